#include <cstdint>
#include <string>
#include <vector>

#include "power_norm_support.hpp"

#include <syncnorm/comm/thread_group.hpp>

using namespace test;
using syncnorm::invalid_argument_error;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;

TEST_CASE("a fault of one rank is thrown on every rank, in the warm-up and after it, and changes nothing") {
  auto const good = random({3, 2, 4});
  struct fault {
    Tensor input, mask;
    std::string text;
    bool throws_here = false; // there is no output that could stand for it
  };
  std::vector<fault> const faults{
      {Tensor{}, {}, "undefined", true},
      {random({3}), {}, "dimensions", true},
      {torch::ones({3, 2, 4}, torch::kInt), {}, "Int", true},
      {good.to(torch::kFloat), {}, "the input is of Float, but weight of Double"},
      {random({3, 2, 5}), {}, "5 channels, expected 4"},
      {good, torch::ones({3, 2}, torch::kBool), "the padding mask is [3, 2], expected [2, 3]"},
      {good, torch::ones({2, 3}, torch::kFloat), "the padding mask is of Float"},
      {good.to_sparse(), {}, "Sparse", true},
      {good, at::_nested_tensor_from_mask(torch::ones({2, 3, 1}), torch::ones({2, 3}, torch::kBool)), "NestedTensor"},
  };
  for (std::int64_t const warmup : {1, 100})
    for (auto const& each : faults)
      run_ranks(2, [&](thread_communicator const& comm) {
        auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(warmup), comm});
        for (int step = 0; step < 2; ++step) train_step(norm, good);
        norm->synchronize();
        auto const before = state_of(*norm);
        bool const bad = comm.rank() == 1;
        auto const text = message_of<invalid_argument_error>([&] {
          auto const y = norm->forward(bad ? each.input : good, bad ? each.mask : Tensor{});
          CHECK(warmup == 1);
          CHECK_FALSE((bad && each.throws_here));
          if (bad) CHECK(y.isnan().all().item<bool>());
          y.sum().backward();
        });
        CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, each.text)), text);
        norm->synchronize();
        CHECK(same_state(before, state_of(*norm)));
        norm->zero_grad();
        train_step(norm, good);
        CHECK(norm->iters() == 3);
      });
  // In evaluation there is nobody to tell.
  PowerNorm norm{4};
  norm->eval();
  CHECK(contains(message_of<invalid_argument_error>([&] { norm->forward(torch::ones({3})); }), "dimensions"));
  CHECK(contains(message_of<invalid_argument_error>([] {
                   PowerNorm { PowerNormOptions{4}.group_num(3) } -> forward(torch::ones({2, 4}));
                 }),
                 "4 channels cannot be divided into 3 groups"));
}

TEST_CASE("what autograd cannot record on one rank is thrown on every rank, and changes nothing") {
  auto const good = random({3, 2, 4}), inference = inference_copy(good);
  dual_tensor const dual{random({3, 2, 4})};
  for (std::int64_t const warmup : {1, 100})
    for (int const kind : {0, 1, 2})
      run_ranks(2, [&](thread_communicator const& comm) {
        auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(warmup), comm});
        for (int step = 0; step < 2; ++step) train_step(norm, good);
        norm->synchronize();
        auto const before = state_of(*norm);
        auto const weight = norm->weight;
        if (kind == 2 && comm.rank() == 1) {
          c10::InferenceMode const inference_mode;
          norm->weight = weight.detach().clone().set_requires_grad(true);
        }
        auto const input = comm.rank() == 0 || kind == 2 ? good : kind == 0 ? inference : dual.get();
        auto const text = message_of<invalid_argument_error>([&] { norm->forward(input).sum().backward(); });
        CHECK_MESSAGE(contains(text, kind == 0   ? "rank 1: the input is an inference tensor"
                                     : kind == 1 ? "rank 1: the input has a forward gradient"
                                                 : "rank 1: weight is an inference tensor"),
                      text);
        norm->synchronize();
        CHECK(same_state(before, state_of(*norm)));
        norm->weight = weight;
        train_step(norm, good);
        CHECK(norm->iters() == 3);
        torch::NoGradGuard const no_recording;
        norm->forward(inference);
        CHECK(norm->iters() == 4);
      });
}

TEST_CASE("a module of another type on one rank is an error on every rank, and changes nothing") {
  auto const x = torch::arange(24, torch::kFloat).view({3, 2, 4}) / 10;
  for (std::int64_t const warmup : {1, 100})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(warmup), comm}, torch::kFloat);
      auto const convert = [&](torch::Dtype type) {
        if (comm.rank() == 1) norm->to(type);
      };
      for (int step = 0; step < 2; ++step) train_step(norm, x);
      norm->synchronize();
      auto const before = state_of(*norm);
      for (auto const type : {torch::kFloat, torch::kHalf}) {
        convert(torch::kHalf);
        auto const text = message_of<invalid_argument_error>(
            [&] { norm->forward(comm.rank() == 1 ? x.to(type) : x).sum().backward(); });
        CHECK_MESSAGE(contains(text, "rank 1: the input is of "), text);
        convert(torch::kFloat);
        norm->synchronize();
      }
      auto const y = norm->forward(x);
      norm->synchronize();
      auto const ema_gz = norm->ema_gz().clone();
      norm->zero_grad();
      convert(torch::kDouble);
      auto const text = message_of<invalid_argument_error>([&] {
        y.sum().backward();
        norm->synchronize();
      });
      CHECK_MESSAGE(contains(text, "rank 1: running_phi is of Double, in the forward pass of Float"), text);
      convert(torch::kFloat);
      CHECK(torch::equal(norm->ema_gz(), ema_gz));
      CHECK(norm->iters() == 3);
      CHECK(error_of(norm->weight, before[0]) <= 1e-3);
    });
}

TEST_CASE("a number of steps that is none on one rank is an error on every rank, and changes nothing") {
  auto const x = random({3, 2, 4});
  for (std::int64_t const warmup : {1, 100})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(warmup), comm});
      auto iters = norm->named_buffers()["iters"];
      auto const set = [&](Tensor const& value) {
        if (comm.rank() == 1) iters.set_data(value);
      };
      for (int step = 0; step < 2; ++step) train_step(norm, x);
      norm->synchronize();
      auto const before = state_of(*norm);
      auto const steps = iters.clone();
      for (auto const& bad : {torch::full({1}, 2.0), torch::empty({0}, torch::kLong)}) {
        set(bad);
        auto text = message_of<invalid_argument_error>([&] {
          train_step(norm, x);
          norm->synchronize();
        });
        CHECK_MESSAGE((contains(text, "rank 1: iters has ") && contains(text, "expected 1 of Long")), text);
        norm->eval(); // does without
        norm->forward(x);
        norm->train();
        set(steps.clone());
        norm->synchronize();
        CHECK(same_state(before, state_of(*norm)));
        // Between a pass and its backward pass.
        auto const y = norm->forward(x);
        norm->synchronize();
        auto const taken = iters.clone(), ema_gz = norm->ema_gz().clone();
        set(bad);
        text = message_of<invalid_argument_error>([&] {
          y.sum().backward();
          norm->synchronize();
        });
        CHECK_MESSAGE(contains(text, "rank 1: iters is null"), text);
        set(taken);
        CHECK(torch::equal(norm->ema_gz(), ema_gz));
        norm->named_buffers()["running_phi"].copy_(before[2]);
        iters.copy_(steps);
        norm->zero_grad();
      }
      train_step(norm, x);
      CHECK(norm->iters() == 3);
    });
}

TEST_CASE("a second moment that is no number is an error, and changes nothing") {
  for (std::int64_t const warmup : {1, 100})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(warmup), comm});
      auto const x = torch::ones({3, 2, 4}, torch::kDouble);
      for (int step = 0; step < 2; ++step) train_step(norm, x);
      norm->synchronize();
      auto const before = state_of(*norm);
      auto const bad = comm.rank() == 1 ? x / 0 : x;
      auto const text = message_of<invalid_argument_error>([&] { train_step(norm, bad); });
      CHECK_MESSAGE(contains(text, "running_phi of channel 0 would become inf"), text);
      norm->synchronize();
      CHECK(same_state(before, state_of(*norm)));
    });
}
