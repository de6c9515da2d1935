#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/StreamGuard.h>

#include "cuda_support.hpp"

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/comm/self.hpp>

#include "cuda/fake_nccl.hpp"

namespace test::on_cuda {

TEST_CASE("CUDA tensors: training agrees with the CPU's, for uneven and empty ranks") {
  torch::manual_seed(71);
  struct types {
    torch::Dtype element, parameter;
  };
  for (auto const& [element, parameter] :
       {types{torch::kFloat, torch::kFloat}, types{torch::kDouble, torch::kDouble}, types{torch::kHalf, torch::kFloat},
        types{torch::kHalf, torch::kHalf}, types{torch::kBFloat16, torch::kFloat},
        types{torch::kBFloat16, torch::kBFloat16}})
    for (auto const& shares : std::vector<std::vector<std::int64_t>>{{3}, {3, 2}, {2, 0, 3}})
      for (bool const channels_last : {false, true}) {
        if (element != torch::kFloat && shares.size() == 1) continue;
        auto const format = channels_last ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
        auto const x = random({5, 4, 3, 3}), dy = random({5, 4, 3, 3});
        auto const norm = make_norm(BatchNormOptions{4}, {}, parameter);
        run_ranks(static_cast<int>(shares.size()), [&, element = element](thread_communicator const& comm) {
          auto const own = [&](Tensor const& whole) {
            return part_of(whole, shares, comm.rank()).to(element).contiguous(format);
          };
          INFO("rank ", comm.rank(), " of ", comm.size(), ", type ", static_cast<int>(element), ", channels_last ",
               channels_last);
          auto host = on_host(norm, comm), device = on_device(norm, comm);
          for (int i = 0; i < 2; ++i) {
            auto const expected = run_step(host, own(x + i), own(dy));
            check_same(run_step(device, own(x + i), own(dy), {}, device_of(comm)), expected, 5);
          }
        });
      }
  check_no_violations();
}

TEST_CASE("CUDA tensors: modes, options and layouts agree with the CPU's") {
  torch::manual_seed(72);
  using change = std::function<void(SyncBatchNormImpl&)>;
  struct mode {
    char const* name;
    BatchNormOptions options;
    change set;
  };
  auto const nothing = [](SyncBatchNormImpl&) {};
  std::vector<mode> const modes{
      {"evaluation", BatchNormOptions{3}, [](auto& norm) { norm.eval(); }},
      {"evaluation by the batch", BatchNormOptions{3}.track_running_stats(false), [](auto& norm) { norm.eval(); }},
      {"frozen statistics", BatchNormOptions{3}, [](auto& norm) { norm.freeze_statistics(); }},
      {"frozen weight", BatchNormOptions{3}, [](auto& norm) { norm.weight.set_requires_grad(false); }},
      {"frozen whole", BatchNormOptions{3},
       [](auto& norm) {
         norm.freeze_statistics();
         for (auto& parameter : norm.parameters()) parameter.set_requires_grad(false);
       }},
      {"nothing of its own", BatchNormOptions{3}.affine(false).track_running_stats(false), nothing},
      {"cumulative average", BatchNormOptions{3}.momentum(c10::nullopt), nothing},
      {"biased variance", BatchNormOptions{3},
       [](auto& norm) { norm.set_running_variance(syncnorm::running_variance::biased); }},
      {"unbiased variance", BatchNormOptions{3},
       [](auto& norm) { norm.set_batch_variance(syncnorm::batch_variance::unbiased); }},
      {"sums", BatchNormOptions{3}, [](auto& norm) { norm.set_exchange_policy(syncnorm::exchange_policy::reduce); }},
      {"local backward passes", BatchNormOptions{3}, [](auto& norm) { norm.set_backward_exchange(false); }}};
  auto const same = [](Tensor const& whole) { return whole; };
  auto const check = [&](mode const& of, std::function<Tensor(Tensor const&)> const& part, Tensor const& x,
                         Tensor const& dy) {
    auto norm = make_norm(of.options, {}, torch::kFloat);
    of.set(*norm);
    run_ranks(2, [&](thread_communicator const& comm) {
      INFO(std::string{of.name}, ", rank ", comm.rank());
      auto const own = part_of(x, {3, 2}, comm.rank());
      auto const own_dy = dy.size(0) == 1 ? dy : part_of(dy, {3, 2}, comm.rank());
      auto host = on_host(norm, comm), device = on_device(norm, comm);
      for (int i = 0; i < 2; ++i) {
        auto const expected = run_step(host, own + i, own_dy, {}, torch::kCPU, part);
        check_same(run_step(device, own + i, own_dy, {}, device_of(comm), part), expected, 5);
      }
    });
  };
  auto const x = torch::randn({5, 3, 4, 4}), dy = torch::randn({5, 3, 4, 4});
  for (auto const& of : modes) check(of, same, x, dy);
  mode const plain{"layouts", BatchNormOptions{3}, nothing};
  check(plain, same, x, torch::ones({1, 1, 1, 1})); // expanded
  check(plain, same, x, dy.contiguous(torch::MemoryFormat::ChannelsLast));
  check(
      plain, [](Tensor const& t) { return t.transpose(2, 3); }, x, dy);
  check(
      plain, [](Tensor const& t) { return t.slice(3, 1, 3); }, x, dy.slice(3, 1, 3));
  check(
      plain, [](Tensor const& t) { return t.slice(2, 0, 4, 2); }, x, dy.slice(2, 0, 2));
  check(
      plain,
      [](Tensor const& t) {
        return t.mean({2, 3});
      },
      x, dy.mean({2, 3}));
  check_no_violations();
}

TEST_CASE("CUDA tensors: activation, residual and mask agree with the CPU's") {
  torch::manual_seed(73);
  auto const x = torch::randn({5, 3, 4, 2}), dy = torch::randn({5, 3, 4, 2}), residual = torch::randn({5, 3, 4, 2});
  auto const mask = torch::rand({5, 4, 2}) > 0.4;
  std::vector<norm_epilogue> const epilogues{{activation::relu()},
                                             {activation::leaky_relu(0.2), residual},
                                             {activation{}, {}, mask},
                                             {activation::relu(), residual, mask, syncnorm::masked_outputs::zero},
                                             {activation::elu(), residual, mask}};
  for (auto const& epilogue : epilogues)
    for (bool const channels_last : {false, true}) {
      auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
      run_ranks(2, [&](thread_communicator const& comm) {
        auto const own = [&](Tensor const& whole) {
          auto const part = part_of(whole, {4, 1}, comm.rank());
          return channels_last && part.dim() == 4 ? part.contiguous(torch::MemoryFormat::ChannelsLast) : part;
        };
        auto with = epilogue;
        if (with.residual.defined()) with.residual = own(residual).contiguous(); // of another layout
        if (with.mask.defined()) with.mask = own(mask);
        auto host = on_host(norm, comm), device = on_device(norm, comm);
        auto const expected = run_step(host, own(x), own(dy), with);
        check_same(run_step(device, own(x), own(dy), with, device_of(comm)), expected, 5);
      });
    }
  check_no_violations();
}

TEST_CASE("CUDA tensors: a gradient penalty agrees with the CPU's") {
  torch::manual_seed(74);
  auto const x = torch::randn({5, 3, 4}, torch::kDouble), dy = torch::randn({5, 3, 4}, torch::kDouble),
             residual = torch::randn({5, 3, 4}, torch::kDouble);
  auto const norm = make_norm(BatchNormOptions{3}.eps(0.1), {}, torch::kDouble);
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const gradients = [&](SyncBatchNorm of, torch::Device const& on) {
      auto const own = [&](Tensor const& whole) { return part_of(whole, {3, 2}, comm.rank()).to(on).requires_grad_(); };
      auto const in = own(x), factor = own(dy), added = own(residual);
      auto const y = of->forward_with(in, {activation::leaky_relu(0.3), added});
      auto const first = torch::autograd::grad({y}, {in, of->weight, of->bias, added}, {factor}, true, true);
      auto loss = first[0].pow(2).sum() + (first[3] * in.detach()).sum();
      loss = loss + (first[1] * of->bias.detach()).sum() + (first[2] * of->weight.detach()).sum();
      loss.backward();
      of->synchronize();
      return std::vector{gradient_of(in), gradient_of(factor), gradient_of(of->weight), gradient_of(added)};
    };
    auto const expected = gradients(on_host(norm, comm), torch::kCPU);
    auto const got = gradients(on_device(norm, comm), device_of(comm));
    for (std::size_t i = 0; i < got.size(); ++i) {
      CAPTURE(i);
      REQUIRE(got[i].defined() == expected[i].defined());
      if (got[i].defined()) CHECK(error_of(got[i], expected[i], 5) <= 1e-12);
    }
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: a step allocates nothing, and the host waits for nothing") {
  auto const raw = fake_nccl::make_group(2);
  struct rank {
    SyncBatchNorm norm{BatchNormOptions{3}};
    torch::Device on;
    Tensor x, dy;

    rank(ncclComm_t of, int index) : on{torch::kCUDA, static_cast<c10::DeviceIndex>(index)} {
      norm->to(on);
      use_cuda(*norm, syncnorm::nccl_communicator::adopt(of));
      x = torch::randn({2, 3, 5}).to(on), dy = torch::randn({2, 3, 5}).to(on);
    }
    Tensor forward() {
      norm->weight.mutable_grad() = norm->bias.mutable_grad() = Tensor{}; // lest it be added to, on the host
      return norm->forward(x.detach().requires_grad_());
    }
  };
  std::array<std::unique_ptr<rank>, 2> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.at(static_cast<std::size_t>(r)) = std::make_unique<rank>(raw.at(static_cast<std::size_t>(r)), r);
  fake_cuda::reset();
  {
    std::jthread const other{[&] { ranks[1]->forward().backward(ranks[1]->dy); }};
    ranks[0]->forward().backward(ranks[0]->dy);
  }
  auto const loads = fake_cuda::calls("cudaFuncGetAttributes"); // lest a first launch wait for the device
  fake_cuda::reset();
  syncnorm::cuda::kernels_of<float>::load_kernels();
  CHECK(loads == 2 * fake_cuda::calls("cudaFuncGetAttributes"));
  auto const step = [&] { // one thread for both: neither waits for the other
    auto const first = ranks[0]->forward(), second = ranks[1]->forward();
    first.backward(ranks[0]->dy);
    second.backward(ranks[1]->dy);
  };
  step(); // after which libtorch's allocator has what one takes
  (void)fake_torch::host_operations();
  fake_cuda::reset();
  for (int i = 0; i < 3; ++i) step();
  CHECK(fake_torch::host_operations() == 0);
  for (auto const* const function :
       {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaStreamSynchronize", "cudaStreamQuery", "cudaEventSynchronize",
        "cudaMemcpy", "cudaMemcpyAsync", "cudaFuncGetAttributes"}) {
    CAPTURE(std::string{function});
    CHECK(fake_cuda::calls(function) == 0);
  }
  CHECK(fake_cuda::calls("kernel") == 3 * 2 * 4);
  CHECK(fake_cuda::calls("ncclAllGather") == 3 * 2 * 2);
  for (auto const& each : ranks) each->norm->synchronize();
  check_no_violations();
}

TEST_CASE("CUDA tensors: passes are on the current stream, one after the other") {
  torch::manual_seed(75);
  torch::Device const device{torch::kCUDA, 0};
  auto const x = torch::randn({4, 3, 5}), dy = torch::randn({4, 3, 5});
  SyncBatchNorm host{BatchNormOptions{3}}, norm{BatchNormOptions{3}};
  norm->to(device);
  use_cuda(*norm, syncnorm::self_communicator{});
  auto const first = fake_torch::make_stream(0), second = fake_torch::make_stream(0);
  auto const on = [&](c10::StreamId id) { return c10::Stream{c10::Stream::UNSAFE, device, id}; };
  // While the default stream is stuck, whatever is enqueued there, or waits for that, takes until the end.
  std::promise<void> go_on;
  bool stuck = false;
  fake_cuda::enqueue(fake_torch::default_stream(0), [&, wait = go_on.get_future().share()] {
    stuck = wait.wait_for(std::chrono::seconds{20}) != std::future_status::ready;
  });
  auto expected = run_step(host, x, dy);
  {
    c10::StreamGuard const current{on(first)};
    check_same(run_step(norm, x, dy, {}, device), expected, 4);
  }
  go_on.set_value();
  cudaStreamSynchronize(fake_torch::default_stream(0));
  CHECK(!stuck);

  auto const inputs = std::array{x.to(device), (2 * x + 1).to(device)};
  {
    c10::StreamGuard const current{on(first)};
    fake_cuda::enqueue(fake_torch::handle_of(first, 0),
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds{50}); });
    (void)norm->forward(inputs[0]);
  }
  c10::StreamGuard const current{on(second)};
  auto const y = norm->forward(inputs[1]);
  norm->synchronize();
  (void)host->forward(x);
  CHECK(error_of(y.cpu(), host->forward(2 * x + 1), 1) <= allowed(torch::kFloat));
  CHECK(error_of(norm->running_mean.cpu(), host->running_mean, 1) <= allowed(torch::kFloat));
  check_no_violations();
}

} // namespace test::on_cuda
