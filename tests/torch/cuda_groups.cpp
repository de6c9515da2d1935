#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_support.hpp"

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/torch/batch_norm_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

#include "cuda/fake_nccl.hpp"

namespace test::on_cuda {

using syncnorm::torch::begin_group_forward;
using syncnorm::torch::group_forward;

TEST_CASE("CUDA tensors: a group of modules gives the bits of each by itself") {
  torch::manual_seed(79);
  auto const relu = activation::relu();
  auto const x = torch::randn({5, 4, 2}), u = torch::randn({5, 3, 2}), added = torch::randn({5, 3, 2});
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    for (auto const& shares : std::vector<std::vector<std::int64_t>>{{5}, {3, 0, 2}}) {
      if (policy == syncnorm::exchange_policy::reduce && shares.size() == 1) continue;
      auto const a = make_norm(BatchNormOptions{4}, {}, torch::kFloat), b = make_norm(BatchNormOptions{3}),
                 frozen = make_norm(BatchNormOptions{4}, {}, torch::kFloat);
      frozen.ptr()->freeze_statistics();
      for (auto const& norm : {a, b}) norm.ptr()->set_exchange_policy(policy);
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        INFO("rank ", comm.rank(), " of ", comm.size());
        auto const own = [&](Tensor const& whole, torch::Dtype type) {
          return part_of(whole, shares, comm.rank()).to(device_of(comm)).to(type).requires_grad_();
        };
        std::vector<std::vector<Tensor>> results;
        for (bool const grouped : {false, true}) {
          std::array norms{on_device(a, comm), on_device(b, comm), on_device(frozen, comm)};
          auto& all = results.emplace_back();
          for (int i = 0; i < 2; ++i) {
            auto const first = own(x, torch::kHalf), second = own(u, torch::kDouble), third = own(x, torch::kFloat);
            norm_epilogue const with{relu, own(added, torch::kDouble)};
            std::vector<Tensor> y;
            if (grouped) {
              auto pending = begin_group_forward({{norms[0], first}, {norms[1], second, with}, {norms[2], third}});
              y = pending.finish();
              CHECK(pending.ready());
            } else {
              y = {norms[0]->forward(first), norms[1]->forward_with(second, with), norms[2]->forward(third)};
            }
            auto loss = torch::zeros({}, second.options());
            for (auto const& each : y) loss = loss + each.to(torch::kDouble).pow(3).sum();
            loss.backward();
            for (auto& norm : norms) {
              auto const left = left_of(norm, {}, {});
              all.insert(all.end(), left.begin(), left.end());
            }
            auto const left = left_of(norms[0], y, {first, second, third, with.residual});
            all.insert(all.end(), left.begin(), left.end());
          }
        }
        CHECK(same_state(results[0], results[1]));
      });
    }
  check_no_violations();
}

TEST_CASE("CUDA tensors: a group over micro-batches gives the bits of each module's by themselves") {
  torch::manual_seed(82);
  auto const x = torch::randn({5, 4, 2}), u = torch::randn({5, 3, 2}), added = torch::randn({5, 4, 2});
  // Samples of each micro-batch of each rank; the second module takes the last one alone.
  for (auto const& shares : std::vector<std::vector<std::vector<std::int64_t>>>{{{2, 3}}, {{0, 2, 1}, {4}, {0, 0}}})
    for (bool const in_place : {false, true}) {
      auto const a = make_norm(BatchNormOptions{4}, {}, torch::kFloat), b = make_norm(BatchNormOptions{3}),
                 frozen = make_norm(BatchNormOptions{4}, {}, torch::kFloat);
      a->weight.detach()[1] = 0, frozen->weight.detach()[2] = 0; // to be kept
      frozen.ptr()->freeze_statistics();
      for (auto const& norm : {a, b, frozen}) norm.ptr()->set_in_place(in_place);
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        INFO("in place ", in_place, ", rank ", comm.rank(), " of ", comm.size());
        auto const& share = shares[static_cast<std::size_t>(comm.rank())];
        enum class timing { by_themselves, at_once, begun };
        std::vector<std::vector<Tensor>> results;
        std::vector<Tensor> sums;
        for (auto const how : {timing::by_themselves, timing::at_once, timing::begun}) {
          std::array norms{on_device(a, comm), on_device(b, comm), on_device(frozen, comm)};
          for (auto const& norm : norms) norm.ptr()->set_in_place(in_place);
          auto& all = results.emplace_back();
          for (int i = 0; i < 2; ++i) {
            std::vector<Tensor> leaves;
            std::vector<syncnorm::torch::group_batches> members;
            for (std::size_t l = 0; l < norms.size(); ++l) {
              auto& member = members.emplace_back(syncnorm::torch::group_batches{norms[l], {}, {}});
              for (std::size_t k = l == 1 ? share.size() - 1 : 0; k < share.size(); ++k) {
                auto const own = [&](Tensor const& whole, torch::Dtype type) {
                  return (whole.slice(0, 0, share[k]) + static_cast<int>(k))
                      .to(device_of(comm))
                      .to(type)
                      .requires_grad_();
                };
                leaves.push_back(l == 1 ? own(u, torch::kDouble) : own(x, l == 0 ? torch::kHalf : torch::kFloat));
                member.inputs.push_back(leaves.back() * 1);
                if (l == 1) continue;
                auto& with = member.epilogues.emplace_back();
                with.activation = activation::leaky_relu(k == 0 ? 0 : 0.5);
                if (k != 1) with.residual = own(added, l == 0 ? torch::kHalf : torch::kFloat);
                if (k != 1) leaves.push_back(with.residual);
              }
            }
            std::vector<std::vector<Tensor>> y;
            if (how == timing::by_themselves)
              for (auto& member : members)
                y.push_back(syncnorm::torch::forward_batches(member.norm, member.inputs, member.epilogues));
            else
              y = how == timing::begun ? syncnorm::torch::begin_group_forward_batches(members).finish()
                                       : syncnorm::torch::group_forward_batches(members);
            auto loss = torch::zeros({}, torch::TensorOptions{}.dtype(torch::kDouble).device(device_of(comm)));
            std::vector<Tensor> outputs;
            for (std::size_t l = 0; l < y.size(); ++l)
              for (std::size_t k = 0; k < y[l].size(); ++k) {
                CHECK(y[l][k].is_same(members[l].inputs[k]) == in_place);
                outputs.push_back(y[l][k]);
                loss = loss + y[l][k].to(torch::kDouble).pow(2).sum();
              }
            loss.backward();
            // By itself, the frozen module has a pass for each micro-batch, whose gradients libtorch adds up.
            for (auto const& parameter : norms[2]->parameters()) sums.push_back(gradient_of(parameter));
            norms[2]->zero_grad();
            for (auto& norm : norms) {
              auto const left = left_of(norm, {}, {});
              all.insert(all.end(), left.begin(), left.end());
            }
            auto const left = left_of(norms[0], outputs, leaves);
            all.insert(all.end(), left.begin(), left.end());
          }
        }
        for (std::size_t i = 1; i < results.size(); ++i) CHECK(same_state(results[0], results[i]));
        for (std::size_t i = 4; i < sums.size(); ++i)
          CHECK(error_of(sums[i], sums[i % 4], 10) <= allowed(torch::kFloat));
      });
    }
  check_no_violations();
}

TEST_CASE("CUDA tensors: every rank joins a group's backward pass, and a gradient penalty goes through it") {
  torch::manual_seed(80);
  auto const x = random({4, 3}), u = random({4, 2});
  auto const a = make_norm(BatchNormOptions{3}.affine(false)), b = make_norm(BatchNormOptions{2});
  run_ranks(3, [&](thread_communicator const& comm) {
    auto const step = [&](SyncBatchNorm first, SyncBatchNorm second, torch::Device const& on, bool penalty) {
      // But for a penalty, rank 0 needs a gradient of the first, rank 1 of the second, and rank 2 of none.
      if (!penalty)
        for (auto& parameter : second->parameters()) parameter.set_requires_grad(false);
      auto const own_x = (x + comm.rank()).to(on).set_requires_grad(penalty || comm.rank() == 0);
      auto const own_u = (u * (1 + comm.rank())).to(on).set_requires_grad(penalty || comm.rank() == 1);
      auto const y = group_forward({{first, own_x}, {second, own_u}});
      auto loss = y[0].pow(3).sum() + y[1].pow(3).sum();
      if (penalty)
        for (auto const& slope : torch::autograd::grad({loss}, {own_x, own_u}, {}, true, /*create_graph=*/true))
          loss = loss + slope.pow(2).sum();
      loss.backward();
      auto all = left_of(first, y, {own_x, own_u});
      for (auto const& each : left_of(second, {}, {})) all.push_back(each);
      return all;
    };
    for (bool const penalty : {false, true}) {
      auto const expected = step(on_host(a, comm), on_host(b, comm), torch::kCPU, penalty);
      auto const got = step(on_device(a, comm), on_device(b, comm), device_of(comm), penalty);
      check_close(got, expected, 1e-12);
    }
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: a group of modules is one collective forward and one backward") {
  auto const raw = fake_nccl::make_group(2);
  struct of_rank {
    of_rank(ncclComm_t comm, int rank) {
      torch::Device const on{torch::kCUDA, static_cast<c10::DeviceIndex>(rank)};
      auto const of_both = syncnorm::nccl_communicator::adopt(comm);
      for (auto const& norm : {a, b}) norm.ptr()->to(on), use_cuda(*norm.ptr(), of_both);
      x = torch::randn({4, 200}).to(on), u = torch::randn({4, 3}).to(on);
      dy = {torch::randn({4, 200}).to(on), torch::randn({4, 3}).to(on)};
    }
    void step() {
      for (auto const& norm : {a, b}) norm.ptr()->zero_grad(true);
      torch::autograd::backward(group_forward({{a, x}, {b, u}}), dy);
    }
    SyncBatchNorm a{BatchNormOptions{200}}, b{BatchNormOptions{3}};
    Tensor x, u;
    std::vector<Tensor> dy;
  };
  std::vector<std::unique_ptr<of_rank>> ranks;
  for (int r = 0; r < 2; ++r) ranks.push_back(std::make_unique<of_rank>(raw[static_cast<std::size_t>(r)], r));
  {
    std::jthread const other{[&] { ranks[1]->step(); }};
    ranks[0]->step();
  }
  std::vector<syncnorm::torch::pending_group_forward> pending; // of one thread for both ranks
  auto const begin = [&] {
    for (auto const& each : ranks) pending.push_back(begin_group_forward({{each->a, each->x}, {each->b, each->u}}));
  };
  {
    torch::NoGradGuard const no_recording;
    begin();
    for (auto& each : pending) (void)each.finish();
    pending.clear();
    fake_cuda::reset();
    begin();
    for (auto& each : pending) (void)each.finish();
    pending.clear();
  }
  for (auto const* const function : {"cudaMalloc", "cudaHostAlloc", "cudaStreamSynchronize", "cudaMemcpyAsync"}) {
    CAPTURE(std::string{function});
    CHECK(fake_cuda::calls(function) == 0);
  }
  CHECK(fake_cuda::calls("ncclAllGather") == 2);
  {
    std::jthread const other{[&] { ranks[1]->step(); }};
    ranks[0]->step();
  }
  CHECK(fake_cuda::calls("ncclAllGather") == 2 + 2 * 2);
  for (auto const& each : ranks) each->a->synchronize(), each->b->synchronize();
  check_no_violations();
}

TEST_CASE("CUDA tensors: what is wrong with one module of a group on one rank is an error on every rank") {
  using syncnorm::invalid_argument_error;
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat), other = make_norm(BatchNormOptions{2});
  auto const x = torch::randn({4, 3}), u = random({4, 2});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const on = device_of(comm);
    bool const here = comm.rank() == 1;
    auto a = on_device(norm, comm), b = on_device(other, comm), on_cpu = on_host(other, comm),
         elsewhere = on_device(other, comm), alone = copy_of(other);
    if (here) elsewhere->to(torch::Device{torch::kCUDA, 3});
    if (here) alone->to(on), use_cuda(*alone, syncnorm::self_communicator{});
    auto const own = x.to(on), second = u.to(on);
    auto const before = state_of(*a), before_b = state_of(*b);
    auto const thrown = [&](SyncBatchNorm const& of, Tensor const& input) {
      auto const text = message_of<invalid_argument_error>([&] {
        group_forward({{a, own}, {of, input}});
        a->synchronize();
      });
      CHECK(same_state(state_of(*a), before));
      CHECK(same_state(state_of(*b), before_b));
      return text;
    };
    std::string const where = "batch_norm forward of layer 1: rank 1: ";
    for (int repeat = 0; repeat < 2; ++repeat)
      CHECK(thrown(b, here ? u : second) == where + "the input is on cpu, expected cuda:1");
    CHECK(thrown(b, here ? own : second) == where + "the input is of Float, but weight of Double");
    CHECK(thrown(here ? on_cpu : b, second) == where + "the module is on cpu, the first of the group on cuda:1");
    CHECK(thrown(elsewhere, second) == where + "the module is on cuda:3, the first of the group on cuda:1");
    CHECK(thrown(here ? alone : b, second) ==
          where + "the module is on rank 0 of 1, the first of the group on rank 1 of 2");
    b->set_in_place();
    auto const leaf = second.clone().requires_grad_(), written = leaf * 1;
    CHECK(thrown(b, here ? leaf : written) ==
          where + "a leaf Variable that requires grad is being used in an in-place operation.");
    CHECK(contains(thrown(b, here ? written.unsqueeze(0).unbind()[0] : written),
                   where + "Output 0 of UnbindBackward0 is a view and is being modified inplace"));
    b->set_in_place(false);
    b->freeze_statistics(); // which by itself would not tell anyone
    CHECK(contains(thrown(b, here ? u : second), "rank 1: the input is on cpu, expected cuda:1"));
    b->freeze_statistics(false);

    auto host_a = on_host(norm, comm), host_b = on_host(other, comm);
    auto const expected = group_forward({{host_a, x}, {host_b, u}}), got = group_forward({{a, own}, {b, second}});
    for (std::size_t l = 0; l < 2; ++l) CHECK(error_of(got[l].cpu(), expected[l], 1) <= allowed(torch::kFloat));
    a->synchronize();
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: a group that failed is followed by a backward pass, which says nothing else") {
  auto const raw = fake_nccl::make_group(2);
  auto const x = torch::randn({4, 3}), u = torch::randn({4, 2});
  std::vector<std::jthread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      torch::Device const on{torch::kCUDA, static_cast<c10::DeviceIndex>(r)};
      SyncBatchNorm a{BatchNormOptions{3}}, b{BatchNormOptions{2}};
      auto const comm = syncnorm::nccl_communicator::adopt(raw.at(static_cast<std::size_t>(r)));
      for (auto const& norm : {a, b}) norm.ptr()->to(on), use_cuda(*norm.ptr(), comm);
      auto const own = x.to(on), second = u.to(on), wrong = r == 1 ? own.slice(1, 0, 2) : own;
      for (bool const alone : {false, true}) {
        auto const group_of = [&](Tensor const& input) {
          return alone ? group_forward({{a, input}}) : group_forward({{b, second}, {a, input}});
        };
        (void)group_of(own);
        auto& first = alone ? a : b;
        first->synchronize();
        auto const before = state_of(*a), before_b = state_of(*b);
        // Gradients are not added up, which the stand-in waits for.
        for (auto const& norm : {a, b}) norm.ptr()->zero_grad(/*set_to_none=*/true);
        std::promise<void> go_on; // until then the host is ahead of the device
        fake_cuda::enqueue(fake_torch::default_stream(r), [wait = go_on.get_future().share()] { wait.wait(); });
        auto const y = group_of(wrong);
        std::vector<Tensor> ones;
        for (auto const& each : y) ones.push_back(torch::ones_like(each));
        torch::autograd::backward(y, ones);
        go_on.set_value();
        CHECK(message_of<syncnorm::invalid_argument_error>([&] { first->synchronize(); }) ==
              std::string{"batch_norm forward"} + (alone ? "" : " of layer 1") +
                  ": rank 1: x has 2 channels, expected 3");
        first->synchronize(); // once
        CHECK(same_state(state_of(*a), before));
        CHECK(same_state(state_of(*b), before_b));
      }
    });
  threads.clear();
  check_no_violations();
}

} // namespace test::on_cuda
