#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/StreamGuard.h>

#include "cuda_support.hpp"

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/torch/micro_batches.hpp>
#include <syncnorm/torch/pending_forward.hpp>

#include "cuda/fake_nccl.hpp"

namespace test::on_cuda {

TEST_CASE("CUDA tensors: micro-batches by one statistic, with epilogues, too, and their gradient penalty agree with "
          "the CPU's") {
  torch::manual_seed(77);
  // Samples of each micro-batch of each rank.
  for (auto const& shares : std::vector<std::vector<std::vector<std::int64_t>>>{{{2, 3, 1}}, {{0}, {1, 2}, {0, 4}}})
    for (auto const type : {torch::kHalf, torch::kDouble}) {
      auto const norm = make_norm(BatchNormOptions{3}.eps(0.1), {}, type == torch::kHalf ? torch::kFloat : type);
      auto const x = random({6, 3, 2, 2}).to(type), dy = random({6, 3, 2, 2}).to(type),
                 residual = random({6, 3, 2, 2}).to(type);
      auto const mask = torch::rand({6, 2, 2}) < 0.7;
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        INFO("rank ", comm.rank(), " of ", comm.size());
        auto const step = [&](SyncBatchNorm of, torch::Device const& on, bool penalty, bool with_epilogues) {
          std::vector<Tensor> inputs, gradients;
          std::vector<norm_epilogue> with;
          for (auto const n : shares[static_cast<std::size_t>(comm.rank())]) {
            auto input = (x.slice(0, 0, n) + comm.rank() + static_cast<int>(inputs.size())).to(on);
            if (inputs.size() == 1) input = input.contiguous(torch::MemoryFormat::ChannelsLast);
            inputs.push_back(input.detach().requires_grad_(inputs.size() != 2));
            gradients.push_back(dy.slice(0, 0, n).to(on));
            auto const k = with.size();
            if (with_epilogues)
              with.push_back({activation::leaky_relu(k == 0 ? 0.25 : 0),
                              k == 1 ? Tensor{} : residual.slice(0, 0, n).to(on).detach().requires_grad_(),
                              k == 2 ? Tensor{} : mask.slice(0, 0, n).to(on),
                              k == 0 ? syncnorm::masked_outputs::zero : syncnorm::masked_outputs::normalized});
          }
          auto const y = on.is_cuda() && type == torch::kDouble && !penalty
                             ? syncnorm::torch::begin_forward_batches(of, inputs, with).finish()
                             : syncnorm::torch::forward_batches(of, inputs, with);
          auto leaves = inputs;
          for (auto const& each : with)
            if (each.residual.defined()) leaves.push_back(each.residual);
          if (penalty) {
            auto loss = torch::zeros({}, inputs[0].options());
            auto edges = std::vector(inputs.begin(), inputs.begin() + (inputs.size() > 1 ? 2 : 1));
            edges.insert(edges.end(), leaves.begin() + static_cast<std::ptrdiff_t>(inputs.size()), leaves.end());
            for (auto const& slope : torch::autograd::grad(y, edges, gradients, true, /*create_graph=*/true))
              loss = loss + slope.pow(2).sum();
            loss.backward();
          } else {
            torch::autograd::backward(y, gradients);
          }
          return left_of(of, y, leaves);
        };
        auto host = on_host(norm, comm), device = on_device(norm, comm);
        for (bool const penalty : {false, true})
          for (bool const with_epilogues : {false, true}) {
            if (penalty && type == torch::kHalf) continue;
            auto const expected = step(host, torch::kCPU, penalty, with_epilogues);
            check_close(step(device, device_of(comm), penalty, with_epilogues), expected, allowed(type));
          }
        for (auto& each : {host, device}) each.ptr()->eval();
        auto const own = x + comm.rank();
        auto const expected = syncnorm::torch::forward_batches(host, {own, own.slice(0, 0, 1)});
        auto const got =
            syncnorm::torch::forward_batches(device, {own.to(device_of(comm)), own.slice(0, 0, 1).to(device_of(comm))});
        check_close({got[0].cpu(), got[1].cpu()}, expected, allowed(type));
      });
    }
  check_no_violations();
}

TEST_CASE("CUDA tensors: two phases give the bits of one, in whatever order ranks finish") {
  torch::manual_seed(78);
  struct mode {
    char const* name;
    torch::Dtype type;
    std::vector<std::int64_t> shares;
    void (*set)(SyncBatchNormImpl&);
    norm_epilogue with{};
  };
  auto const nothing = [](SyncBatchNormImpl&) {};
  auto const mask = torch::tensor({1, 0, 1, 1, 0, 1, 1, 1, 0, 1}).view({5, 2}).to(torch::kBool);
  std::vector<mode> const modes{
      {"training", torch::kFloat, {3, 0, 2}, nothing},
      {"one rank", torch::kFloat, {5}, nothing},
      {"epilogue",
       torch::kDouble,
       {3, 0, 2},
       nothing,
       {activation::leaky_relu(0.1), random({5, 4, 2}), mask, syncnorm::masked_outputs::zero}},
      {"evaluation", torch::kFloat, {5}, [](SyncBatchNormImpl& norm) { norm.eval(); }},
      {"reduced", torch::kFloat, {3, 0, 2}, [](SyncBatchNormImpl& norm) {
         norm.set_exchange_policy(syncnorm::exchange_policy::reduce);
       }}};
  auto const x = random({5, 4, 2}), dy = random({5, 4, 2});
  for (auto const& of : modes) {
    auto const norm = make_norm(BatchNormOptions{4}, {}, of.type);
    of.set(*norm.ptr());
    run_ranks(static_cast<int>(of.shares.size()), [&](thread_communicator const& comm) {
      INFO(std::string{of.name}, ", rank ", comm.rank(), " of ", comm.size());
      auto const on = device_of(comm);
      auto const own = [&](Tensor const& whole) {
        auto const part = part_of(whole, of.shares, comm.rank()).to(on);
        return part.is_floating_point() ? part.to(of.type) : part;
      };
      auto with = of.with;
      if (with.residual.defined()) with.residual = own(with.residual);
      if (with.mask.defined()) with.mask = own(with.mask);
      std::vector<std::vector<Tensor>> results;
      for (bool const in_two : {false, true}) {
        auto first = on_device(norm, comm), second = on_device(norm, comm);
        for (int i = 0; i < 2; ++i) {
          auto const u = (own(x) + i).detach().requires_grad_(), v = (2 * own(x)).detach().requires_grad_();
          auto const w = (own(x) - 1).detach().requires_grad_();
          std::vector<Tensor> y(3);
          if (in_two) {
            auto a = first->begin_forward(u, with), b = second->begin_forward(v, with);
            auto c = first->begin_forward(w, with); // of the same module
            bool const odd = comm.rank() % 2 == 1;
            y[odd ? 1 : 0] = (odd ? b : a).finish();
            y[odd ? 0 : 1] = (odd ? a : b).finish();
            y[2] = c.finish();
            CHECK((a.ready() && b.ready() && c.ready()));
          } else {
            y = {first->forward_with(u, with), second->forward_with(v, with), first->forward_with(w, with)};
          }
          // From one tensor, for the same order on every rank.
          ((y[0] + 2 * y[1] + 3 * y[2]) * own(dy)).sum().backward();
          auto left = left_of(first, y, {u, v, w});
          auto const of_second = left_of(second, {}, {});
          left.insert(left.end(), of_second.begin(), of_second.end());
          if (i == 1) results.push_back(left);
        }
      }
      CHECK(same_state(results[0], results[1]));
    });
  }
  check_no_violations();
}

TEST_CASE(
    "CUDA tensors: passes in two phases wait for nothing, are recorded where autograd records, and may be dropped") {
  auto const raw = fake_nccl::make_group(2);
  struct of_rank {
    of_rank(ncclComm_t comm, int rank) : device{torch::kCUDA, static_cast<c10::DeviceIndex>(rank)} {
      norm->to(device);
      use_cuda(*norm, syncnorm::nccl_communicator::adopt(comm));
      x = torch::randn({4, 3}).to(device);
      dy = torch::randn({4, 3}).to(device);
    }
    torch::Device device;
    SyncBatchNorm norm{BatchNormOptions{3}};
    Tensor x, dy;
  };
  std::vector<std::unique_ptr<of_rank>> ranks;
  for (int r = 0; r < 2; ++r) ranks.push_back(std::make_unique<of_rank>(raw[static_cast<std::size_t>(r)], r));
  auto const step = [&](bool drop) { // one thread for both: neither waits for the other
    for (auto const& each : ranks) each->norm->zero_grad(true);
    auto first = ranks[0]->norm->begin_forward(ranks[0]->x);
    cudaStreamSynchronize(fake_torch::default_stream(0));
    CHECK_FALSE(first.ready());
    auto second = ranks[1]->norm->begin_forward(ranks[1]->x);
    auto const z = second.finish();
    if (drop) return;
    auto const y = first.finish();
    y.backward(ranks[0]->dy), z.backward(ranks[1]->dy);
  };
  {
    std::jthread const other{[&] { (void)ranks[1]->norm->forward(ranks[1]->x); }}; // ranks agree
    (void)ranks[0]->norm->forward(ranks[0]->x);
  }
  step(false);
  fake_cuda::reset();
  step(false);
  for (auto const* const function :
       {"cudaMalloc", "cudaHostAlloc", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaFuncGetAttributes"}) {
    CAPTURE(std::string{function});
    CHECK(fake_cuda::calls(function) == 0);
  }
  CHECK(fake_cuda::calls("ncclAllGather") == 2 * 2);
  for (auto const& each : ranks) each->norm->synchronize();
  auto const before = state_of(*ranks[0]->norm);
  {
    torch::NoGradGuard const no_recording;
    step(true);
    step(true);
  }
  CHECK(same_state(state_of(*ranks[0]->norm), before));
  CHECK_FALSE(same_state(state_of(*ranks[1]->norm), before));
  step(false);
  for (auto const& each : ranks) each->norm->synchronize();

  SyncBatchNorm alone{BatchNormOptions{3}.affine(false)}; // nobody needs gradients but by the input
  use_cuda(*alone, syncnorm::self_communicator{});
  alone->to(ranks[0]->device);
  auto const x = ranks[0]->x;
  CHECK_FALSE(alone->begin_forward(x).finish().requires_grad());
  CHECK(alone->begin_forward(x.detach().requires_grad_()).finish().requires_grad());
  auto written = x.clone();
  auto pending = alone->begin_forward(written);
  written.add_(1);
  CHECK(contains(message_of<syncnorm::invalid_argument_error>([&] { (void)pending.finish(); }), "written to before"));
  check_no_violations();
}

TEST_CASE("CUDA tensors: a pass in two phases stays on the stream of its beginning, and the current one waits for it") {
  torch::Device const device{torch::kCUDA, 0};
  SyncBatchNorm host{BatchNormOptions{3}}, norm{BatchNormOptions{3}};
  norm->to(torch::kDouble), host->to(torch::kDouble); // num_batches_tracked, too
  norm->to(device);
  use_cuda(*norm, syncnorm::self_communicator{});
  auto const x = random({4, 3, 5}), on_device = x.to(device);
  auto const first = fake_torch::make_stream(0), second = fake_torch::make_stream(0);
  auto const on = [&](c10::StreamId id) { return c10::Stream{c10::Stream::UNSAFE, device, id}; };
  std::optional<syncnorm::torch::pending_forward> a, b;
  {
    c10::StreamGuard const current{on(first)};
    a.emplace(norm->begin_forward(on_device));
    b.emplace(norm->begin_forward(2 * on_device));
    fake_cuda::enqueue(fake_torch::handle_of(first, 0),
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds{50}); });
  }
  c10::StreamGuard const current{on(second)};
  auto const y = a->finish();
  CHECK(error_of(y.cpu(), host->forward(x), 1) <= allowed(torch::kDouble)); // after what `second` has
  auto const z = b->finish();
  CHECK(error_of(z.cpu(), host->forward(2 * x), 1) <= allowed(torch::kDouble));
  CHECK(error_of(norm->running_mean.cpu(), host->running_mean, 1) <= allowed(torch::kDouble));
  CHECK(norm->num_batches_tracked.cpu().item<double>() == 2);
  check_no_violations();
}

TEST_CASE("CUDA tensors: the memory of a pass in two phases stays until the stream that finished it is done with it") {
  torch::Device const device{torch::kCUDA, 0};
  auto const first = fake_torch::make_stream(0), second = fake_torch::make_stream(0);
  auto const on = [&](c10::StreamId id) { return c10::Stream{c10::Stream::UNSAFE, device, id}; };
  auto const x = random({4, 3, 50}), dy = random({4, 3, 50});
  for (bool const in_place : {false, true})
    for (bool const recorded : {false, true}) {
      INFO("in place ", in_place, ", recorded ", recorded);
      SyncBatchNorm host{BatchNormOptions{3}}, norm{BatchNormOptions{3}};
      for (auto each : {host, norm}) { // a channel that is kept in place
        torch::NoGradGuard const no_recording;
        each->to(torch::kDouble);
        each->weight[1].zero_();
      }
      norm->to(device);
      use_cuda(*norm, syncnorm::self_communicator{});
      norm->set_in_place(in_place);
      at::AutoGradMode const recording{recorded};
      auto const given = x.to(device) * 1, gradient = dy.to(device);
      auto const result = torch::empty_like(given);
      REQUIRE(cudaStreamSynchronize(fake_torch::default_stream(0)) == cudaSuccess);
      std::optional<syncnorm::torch::pending_forward> pending;
      {
        c10::StreamGuard const current{on(first)};
        pending.emplace(norm->begin_forward(in_place ? given * 1 : given));
      }
      {
        c10::StreamGuard const current{on(second)};
        auto const y = pending->finish();
        pending.reset();
        if (recorded) CHECK(y.grad_fn()->stream(c10::DeviceType::CUDA)->id() == first);
        fake_cuda::enqueue(fake_torch::handle_of(second, 0),
                           [] { std::this_thread::sleep_for(std::chrono::milliseconds{50}); });
        torch::NoGradGuard const no_recording;
        result.copy_(y);
        if (recorded) y.backward(gradient);
      }
      {
        c10::StreamGuard const current{on(first)}; // whose memory is given out again
        std::vector<Tensor> others;
        for (std::int64_t bytes = 512; bytes <= 8192; bytes += 512)
          for (int i = 0; i < 4; ++i) {
            others.push_back(torch::empty({bytes}, torch::dtype(torch::kByte).device(device)));
            others.back().fill_(0);
          }
      }
      for (auto const stream : {second, first})
        REQUIRE(cudaStreamSynchronize(fake_torch::handle_of(stream, 0)) == cudaSuccess);
      auto const expected = host->forward(x);
      CHECK(error_of(result.cpu(), expected.detach(), 1) <= allowed(torch::kDouble));
      if (!recorded) continue;
      expected.backward(dy);
      CHECK(error_of(norm->weight.grad().cpu(), host->weight.grad(), 1) <= allowed(torch::kDouble));
    }
  check_no_violations();
}

} // namespace test::on_cuda
