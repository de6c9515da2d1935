#include <future>
#include <string>
#include <thread>
#include <vector>

#include "cuda_support.hpp"

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/torch/micro_batches.hpp>
#include <syncnorm/torch/power_norm.hpp>

#include "cuda/fake_nccl.hpp"

namespace test::on_cuda {

TEST_CASE("CUDA tensors: what is wrong on one rank is an error on every rank, and changes nothing") {
  using syncnorm::invalid_argument_error;
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  auto const x = torch::randn({4, 3, 5}), dy = torch::randn({4, 3, 5});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const on = device_of(comm);
    auto const mine = x.to(on);
    auto const wrong_on_one = [&](Tensor const& wrong) { return comm.rank() == 1 ? wrong : mine; };
    auto host = on_host(norm, comm), device = on_device(norm, comm);
    CHECK(message_of<invalid_argument_error>([&] { (void)device->forward(wrong_on_one(x)); }) ==
          "batch_norm forward: rank 1: the input is on cpu, expected cuda:1");
    check_same(run_step(device, x, dy, {}, on), run_step(host, x, dy), 8);
    auto const before = state_of(*device);
    std::vector<std::pair<Tensor, std::string>> const wrong{
        {x, "the input is on cpu, expected cuda:1"},
        {x.to(torch::Device{torch::kCUDA, 3}), "the input is on cuda:3, expected cuda:1"},
        {mine.to(torch::kDouble), "the input is of Double, but weight of Float"},
        {mine.slice(1, 0, 2), "x has 2 channels, expected 3"}};
    // By the pass itself or by what follows it, as soon as the device has come to it.
    auto const message = [&]<class Error>(Error const*, auto const& pass) {
      return message_of<Error>([&] {
        (void)pass();
        device->synchronize();
      });
    };
    invalid_argument_error const* const invalid = nullptr;
    syncnorm::mismatch_error const* const mismatch = nullptr;
    for (auto const& [input, text] : wrong) {
      CHECK(message(invalid, [&] { return device->forward(wrong_on_one(input)); }) ==
            "batch_norm forward: rank 1: " + text);
      CHECK(same_state(state_of(*device), before));
    }
    auto const mask = wrong_on_one(torch::ones({4, 5}, torch::kBool));
    auto const masked = message(invalid, [&] { return device->forward_with(mine, {activation::relu(), {}, mask}); });
    CHECK(contains(masked, "rank 0: the mask is"));
    CHECK(contains(message(mismatch,
                           [&] {
                             at::AutoGradMode const recording{comm.rank() == 0};
                             return device->forward(mine);
                           }),
                   "ranks disagree on whether a backward pass follows: rank 0 needs one, rank 1 records no gradients"));
    CHECK(same_state(state_of(*device), before));
    using syncnorm::torch::forward_batches;
    auto const batches = [&](Tensor const& second) {
      return message(invalid, [&] { return forward_batches(device, {mine, wrong_on_one(second)}); });
    };
    CHECK(batches(x) == "batch_norm forward: rank 1: micro-batch 1: the input is on cpu, expected cuda:1");
    CHECK(batches(mine.to(torch::kHalf)) == "batch_norm forward: rank 1: micro-batch 1: the input is of another type");
    CHECK(batches(mine.slice(1, 0, 2)) == "batch_norm forward: rank 1: x[1] has 2 channels, expected 3");
    CHECK(message(invalid, [&] {
            return forward_batches(device, std::vector<Tensor>(comm.rank() == 1 ? 0 : 1, mine));
          }) == "batch_norm forward: rank 1: there are no micro-batches; pass one without samples");
    auto const in_two = [&](Tensor const& input) {
      return message(invalid, [&] { return device->begin_forward(wrong_on_one(input)).finish(); });
    };
    CHECK(in_two(x) == "batch_norm forward: rank 1: the input is on cpu, expected cuda:1");
    CHECK(in_two(mine.slice(1, 0, 2)) == "batch_norm forward: rank 1: x has 2 channels, expected 3");
    CHECK(in_two(Tensor{}) == "batch_norm forward: rank 1: the input is undefined");
    CHECK(same_state(state_of(*device), before));
    check_same(run_step(device, x, dy, {}, on), run_step(host, x, dy), 8);
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: a forward pass that failed is followed by a backward pass, which says nothing else") {
  auto const raw = fake_nccl::make_group(2);
  auto const x = torch::randn({4, 3, 5});
  std::vector<std::jthread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      torch::Device const on{torch::kCUDA, static_cast<c10::DeviceIndex>(r)};
      SyncBatchNorm norm{BatchNormOptions{3}};
      norm->to(on);
      use_cuda(*norm, syncnorm::nccl_communicator::adopt(raw.at(static_cast<std::size_t>(r))));
      auto const input = x.to(on);
      (void)norm->forward(input);
      norm->synchronize();
      auto const before = state_of(*norm);
      auto const wrong = r == 1 ? input.to(torch::kDouble) : input;
      std::promise<void> go_on; // until then the host is ahead of the device
      fake_cuda::enqueue(fake_torch::default_stream(r), [wait = go_on.get_future().share()] { wait.wait(); });
      auto const y = norm->forward(wrong);
      y.backward(torch::ones_like(y));
      go_on.set_value();
      CHECK(message_of<syncnorm::invalid_argument_error>([&] { norm->synchronize(); }) ==
            "batch_norm forward: rank 1: the input is of Double, but weight of Float");
      CHECK(same_state(state_of(*norm), before));
      (void)norm->forward(input);
      norm->synchronize();
    });
  threads.clear();
  check_no_violations();
}

TEST_CASE("CUDA tensors: what there is not is an error that says so") {
  using syncnorm::invalid_argument_error;
  torch::Device const device{torch::kCUDA, 0};
  SyncBatchNorm norm{BatchNormOptions{3}};
  auto const x = torch::randn({4, 3, 5}).to(device);
  auto const missing = [&] { return message_of<invalid_argument_error>([&] { (void)norm->forward(x); }); };
  CHECK(contains(missing(), "CUDA tensors need syncnorm::torch::use_cuda"));
  norm->to(device);
  CHECK(contains(missing(), "CUDA tensors need syncnorm::torch::use_cuda"));
  use_cuda(*norm, syncnorm::self_communicator{});
  CHECK(norm->forward(x).device() == device);
  auto const text = [&](auto const& f) { return message_of<invalid_argument_error>(f); };

  norm->eval(); // where nothing is exchanged, nor told later
  CHECK(text([&] { (void)norm->forward(x.cpu()); }) == "batch_norm inference: the input is on cpu, expected cuda:0");
  norm->train();
  SyncBatchNorm bare{BatchNormOptions{3}.affine(false).track_running_stats(false)};
  use_cuda(*bare, syncnorm::self_communicator{});
  CHECK(bare->forward(x).device() == device);
  CHECK(contains(text([&] { (void)bare->forward(x.cpu()); }), "the input is on cpu, expected cuda:0"));

  auto copy = copy_of(norm); // which has passes of its own
  CHECK(copy->forward(x).device() == device);
  norm->set_communicator(syncnorm::self_communicator{});
  CHECK(contains(missing(), "CUDA tensors need syncnorm::torch::use_cuda"));
  CHECK(copy->forward(x).device() == device);
  copy->to(torch::kCPU);
  CHECK(copy->forward(x.cpu()).device().is_cpu());

  syncnorm::torch::PowerNorm power{5}; // of [T, B, C]
  power->to(device);
  CHECK(text([&] { (void)power->forward(x); }) == "power_norm forward: the input is on cuda:0, expected cpu");

  run_ranks(2, [&](thread_communicator const& comm) {
    SyncBatchNorm of_two{BatchNormOptions{3}, comm};
    CHECK(text([&] { use_cuda(*of_two, syncnorm::self_communicator{}); }) ==
          "use_cuda: a module is on rank " + std::to_string(comm.rank()) +
              " of 2, the communicator for CUDA tensors on rank 0 of 1");
  });
}

TEST_CASE("CUDA tensors: every rank joins a backward pass, and a recorded pass outlives its module") {
  torch::manual_seed(76);
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  auto const x = torch::randn({5, 3, 4}), dy = torch::randn({5, 3, 4});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const dx = [&](SyncBatchNorm of, torch::Device const& on) {
      for (auto& parameter : of->parameters()) parameter.set_requires_grad(false);
      auto const in = part_of(x, {3, 2}, comm.rank()).to(on).set_requires_grad(comm.rank() == 0);
      auto const y = of->forward(in);
      CHECK(y.requires_grad());
      auto const another = of->forward(3 * in.detach().flip(0)); // which keeps statistics of its own
      of = SyncBatchNorm{nullptr};
      y.backward(part_of(dy, {3, 2}, comm.rank()).to(on));
      return gradient_of(in);
    };
    auto const expected = dx(on_host(norm, comm), torch::kCPU), got = dx(on_device(norm, comm), device_of(comm));
    CHECK(got.defined() == (comm.rank() == 0));
    if (got.defined()) CHECK(error_of(got, expected, 1) <= allowed(torch::kFloat));
  });
  check_no_violations();
}

} // namespace test::on_cuda
