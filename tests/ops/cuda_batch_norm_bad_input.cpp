#include "ops/cuda_step.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include <support/sanitized.hpp>

namespace {

namespace cuda = syncnorm::cuda;
using test::layer_over;
using test::state_of;
using test::step_memory;

/// A good step, one that `spoil` spoils on rank 1, and a good one again. Every rank throws the same, keeps its state and its
/// outputs, and goes on. The pass is the forward pass, or, where the message says so, the backward pass.
template <class C>
void check_spoiled(C const& comm, std::function<void(step_memory&)> const& spoil, std::string const& message,
                   bool first_step_good, bool captured,
                   syncnorm::exchange_policy policy = syncnorm::exchange_policy::gather) {
  layer_over<C> layer{comm, 3, {.norm = {.exchange = policy}}};
  test::stream const on;
  step_memory good, bad;
  if (first_step_good) {
    good.forward(layer, on);
    good.backward(layer, on);
    layer.synchronize(on);
  }
  bool const in_backward = message.find("backward") != std::string::npos;
  if (in_backward) {
    bad.forward(layer, on);
    layer.synchronize(on);
  }
  auto const before = state_of(layer);
  auto const y = bad.y.get(), dx = bad.dx.get();
  if (comm.rank() == 1) spoil(bad);
  auto const said = test::thrown<syncnorm::invalid_argument_error>([&] {
    test::run_on(on, captured, [&](cudaStream_t) { in_backward ? bad.backward(layer, on) : bad.forward(layer, on); });
    layer.synchronize(on);
  });
  CHECK(said == message);
  layer.synchronize(on); // said once
  CHECK(state_of(layer) == before);
  CHECK(bad.y.get() == y);
  CHECK(bad.dx.get() == dx);

  good.forward(layer, on);
  good.backward(layer, on);
  layer.synchronize(on);
  CHECK(state_of(layer)[0] == before[0] + 1);
}

void check_everywhere(std::function<void(step_memory&)> const& spoil, std::string const& message) {
  INFO(message);
  test::over_nccl(3, [&](auto const& comm) { check_spoiled(comm, spoil, message, true, true); });
  if (!test::sanitized) {
    test::over_nccl(3, [&](auto const& comm) {
      check_spoiled(comm, spoil, message, true, true, syncnorm::exchange_policy::reduce);
    });
    for (bool const first_step_good : {true, false})
      test::over_nccl(3, [&](auto const& comm) { check_spoiled(comm, spoil, message, first_step_good, false); });
    test::over_threads(2, [&](auto const& comm) { check_spoiled(comm, spoil, message, true, false); });
  }
  test::check_no_violations();
}

} // namespace

TEST_CASE("what is wrong with a pass on a device on one rank is an error on every rank, and nothing is written") {
  std::string const forward = "batch_norm forward: rank 1: ", backward = "batch_norm backward: rank 1: ";
  check_everywhere([](auto& in) { in.x.view.data = in.on_host.data(); },
                   forward + "x is memory of the host, expected of device 0");
  check_everywhere([](auto& in) { in.x.view.data = nullptr; }, forward + "x is null, its extents are [2, 3, 5]");
  check_everywhere([](auto& in) { in.x.view.channels = 2; }, forward + "x has 2 channels, expected 3");
  check_everywhere([](auto& in) { in.y.view.data = in.on_host.data(); },
                   forward + "y is memory of the host, expected of device 0");
  check_everywhere(
      [](auto& in) { in.x.view.data = reinterpret_cast<float*>(reinterpret_cast<char*>(in.x.view.data) + 2); },
      forward + "x is misaligned: its address is no multiple of 4");
  check_everywhere(
      [](auto& in) {
        static std::vector<std::uint8_t> const on_host(10, 1);
        in.epilogue.mask = syncnorm::mask_of(on_host.data(), 2, 5);
      },
      forward + "the mask is memory of the host, expected of device 0");
  check_everywhere([](auto& in) { in.dy.view.samples = 1; }, backward + "dy is [1, 3, 5], expected [2, 3, 5] as x");
  check_everywhere([](auto& in) { in.dx.view.data = in.on_host.data(); },
                   backward + "dx is memory of the host, expected of device 0");
  auto const turned = [](syncnorm::tensor_view<float> const& of) {
    return syncnorm::nhwc(of.data, of.samples, of.channels, of.spatial);
  };
  check_everywhere([&](auto& in) { in.y.view = turned(in.x.view); },
                   forward + "y and x overlap in memory, and are not the same");
  check_everywhere([&](auto& in) { in.dx.view = turned(in.dy.view); },
                   backward + "dx and dy overlap in memory, and are not the same");
}

TEST_CASE("a backward pass after a forward pass that failed adds nothing, and says nothing else") {
  auto const check = [](auto const& comm, syncnorm::exchange_policy policy) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = policy}}};
    test::stream const on;
    layer.prepare(on);
    step_memory step;
    if (comm.rank() == 1) step.x.view.data = nullptr;
    std::vector<std::string> said;
    auto const note = [&](auto const& f) {
      if (auto const what = test::thrown<syncnorm::invalid_argument_error>(f); !what.empty()) said.push_back(what);
    };
    note([&] { step.forward(layer, on); });
    step.x.view.data = step.x.memory.data();
    on.wait();
    note([&] { step.backward(layer, on); });
    CHECK(said.size() == 1); // by the next call, as it was known
    note([&] { layer.synchronize(on); });
    note([&] { layer.synchronize(on); });
    CHECK((said == std::vector<std::string>{"batch_norm forward: rank 1: x is null, its extents are [2, 3, 5]"}));
    CHECK(state_of(layer) == std::vector<float>{0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0});
  };
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) { check(comm, policy); });
  test::check_no_violations();
}

TEST_CASE("a forward pass that fails on one rank alone leaves no earlier one for a collective backward pass") {
  test::over_nccl(2, [](auto const& comm) {
    test::stream const on;
    layer_over<test::nccl_communicator> layer{comm, 3};
    step_memory step;
    step.forward(layer, on);
    step.backward(layer, on);
    layer.synchronize(on);
    layer.freeze_statistics(); // and so nothing is collective
    bool const bad = comm.rank() == 1;
    if (bad) step.x.view.data = nullptr;
    auto const said = [&](auto const& f) {
      return test::thrown<syncnorm::invalid_argument_error>([&] {
        f();
        layer.synchronize(on);
      });
    };
    CHECK(said([&] { step.forward(layer, on); }).empty() != bad);
    step.x.view.data = step.x.memory.data();
    CHECK(said([&] { step.backward(layer, on); }) == (bad ? "batch_norm backward: there was no forward pass" : ""));
  });
  test::check_no_violations();
}

TEST_CASE("ranks that differ in options or channels all get the error of the host, from the first pass") {
  test::over_nccl(3, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.eps = comm.rank() == 2 ? 1e-3 : 1e-5}}};
    test::stream const on;
    step_memory step;
    CHECK(test::thrown<syncnorm::mismatch_error>([&] {
            step.forward(layer, on);
          }).find("ranks disagree on eps: rank 0 has 1.0000000000000001e-05, rank 2 has 0.001") != std::string::npos);
    CHECK_THROWS_AS(layer.prepare(on), syncnorm::mismatch_error);
  });
  test::over_threads(2, [](auto const& comm) {
    layer_over<test::staged_threads> layer{comm, 3 + comm.rank()};
    test::stream const on;
    CHECK(test::thrown<syncnorm::mismatch_error>([&] { layer.prepare(on); }).find("the number of channels") !=
          std::string::npos);
  });
}

TEST_CASE("on a device, too, an eps of -0 is one of 0, and a negative counter counts as 0") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.eps = comm.rank() == 1 ? -0.0 : 0.0}}};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    layer.synchronize(on);
    CHECK(state_of(layer).front() == 1);
  });
  std::vector<std::vector<float>> states;
  for (std::int64_t const tracked : {0, -1}) {
    layer_over<syncnorm::self_communicator> layer{{}, 3, {.norm = {.momentum = {}}}};
    test::copy_to_device(layer.num_batches_tracked(), &tracked, sizeof tracked);
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    layer.synchronize(on);
    states.push_back(state_of(layer));
    states.back().front() -= static_cast<float>(tracked);
  }
  CHECK(states[0] == states[1]);
  test::check_no_violations();
}

TEST_CASE("a backward pass of another batch than the forward pass had on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    layer.synchronize(on);
    auto const part = [&](auto const& view) { return comm.rank() == 1 ? view.sample_range(0, 1) : view; };
    std::string const what = "rank 1: x has 5 values per channel, in the forward pass 10";
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.backward(part(step.x.view), part(step.dy.view), part(step.dx.view), on);
            layer.synchronize(on);
          }) == "batch_norm backward: " + what);
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.double_backward({.dx = part(step.dy.view)}, part(step.x.view), part(step.dy.view), part(step.dx.view),
                                  {}, {}, {}, on);
            layer.synchronize(on);
          }) == "batch_norm 2nd backward: " + what);
    step.backward(layer, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

TEST_CASE("another current device than that of the layer on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    step.backward(layer, on);
    layer.synchronize(on);
    if (comm.rank() == 1) cudaSetDevice(1);
    for (bool const in_two_phases : {false, true})
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              if (in_two_phases)
                layer.begin_forward(step.x.view, step.y.view, {}, on).finish(on);
              else
                step.forward(layer, on);
              layer.synchronize(on);
            }) == "batch_norm forward: rank 1: the current device is 1, the memory of the layer is on 0");
    int current = -1;
    cudaGetDevice(&current);
    CHECK(current == comm.rank());
    cudaSetDevice(0);
    step.forward(layer, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

TEST_CASE("a stream of another device than that of the layer on one rank is an error on every rank") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    for (bool const first_step_good : {true, false})
      test::over_nccl(2, [&](auto const& comm) {
        layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = policy}}};
        test::stream const on;
        cudaSetDevice(1);
        test::stream const elsewhere;
        cudaSetDevice(0);
        step_memory step;
        if (first_step_good) {
          step.forward(layer, on);
          layer.synchronize(on);
        }
        cudaStream_t const stream = comm.rank() == 1 ? elsewhere : on;
        for (bool const in_two_phases : {false, true})
          CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
                  if (in_two_phases)
                    layer.begin_forward(step.x.view, step.y.view, {}, stream).finish(stream);
                  else
                    layer.forward(step.x.view, step.y.view, stream);
                  layer.synchronize(stream);
                }) == "batch_norm forward: rank 1: the stream is of device 1, the memory of the layer is on 0");
        step.forward(layer, on);
        layer.synchronize(on);
      });
  test::check_no_violations();
}

TEST_CASE("a rank that runs a pass while another one prepares is told so") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = syncnorm::exchange_policy::gather}}};
    step_memory step;
    test::stream const on;
    if (comm.rank() == 0) return layer.prepare(on);
    CHECK(test::thrown<syncnorm::mismatch_error>([&] {
            step.forward(layer, on);
            layer.synchronize(on);
          }) ==
          "batch_norm preparation: ranks disagree on the operation: rank 0 has batch_norm preparation, rank 1 has "
          "batch_norm forward");
  });
}

TEST_CASE("one value per channel over all ranks is too few") {
  std::string const message = "batch_norm forward: training needs more than 1 value per channel over all ranks, got 1";
  auto const check = [&](auto const& comm, syncnorm::exchange_policy policy) {
    layer_over<test::nccl_communicator> layer{comm, 2, {.norm = {.exchange = policy}}};
    layer_cases::device_tensor<float> x{test::layout::nc, comm.rank(), 2, 1};
    test::stream const on;
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.forward(x.view, x.view, on);
            layer.synchronize(on);
          }) == message);
    CHECK(state_of(layer)[0] == 0);
  };
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) { check(comm, policy); });
  layer_over<syncnorm::self_communicator> layer{{}, 2};
  layer_cases::device_tensor<float> x{test::layout::nc, 1, 2, 1};
  test::stream const on;
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { layer.forward(x.view, x.view, on); }) == message);
}

TEST_CASE("what cannot be captured is an error before anything is") {
  auto const captured = [](test::stream const& on, auto const& pass) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    auto said = test::thrown<syncnorm::invalid_argument_error>(pass);
    CHECK(cudaStreamEndCapture(on, &graph) == cudaSuccess);
    cudaGraphDestroy(graph);
    pass();
    return said;
  };
  test::over_nccl(2, [&](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    CHECK(captured(on, [&] { step.forward(layer, on); }).find("call prepare(stream) on every rank first") !=
          std::string::npos);
    auto const second = [&] { layer.double_backward({}, step.x.view, step.dy.view, step.dx.view, {}, {}, {}, on); };
    CHECK(captured(on, second).find("call reserve_double_backward() first") != std::string::npos);
    layer.synchronize(on);
  });
  test::over_threads(2, [&](auto const& comm) {
    layer_over<test::staged_threads> layer{comm, 3};
    test::stream const on;
    step_memory step;
    layer.prepare(on);
    CHECK(captured(on, [&] { step.forward(layer, on); }).find("the exchange of this communicator cannot be") !=
          std::string::npos);
    layer.synchronize(on);
  });
}

TEST_CASE("another device than that of the layer, and a device that fails") {
  layer_over<syncnorm::self_communicator> layer{{}, 3};
  step_memory step;
  test::stream const on;
  cudaSetDevice(1);
  test::stream const elsewhere;
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.forward(layer, on);
        }).find("the current device is 1, the memory of the layer is on 0") != std::string::npos);
  layer_cases::device_tensor<float> other{test::layout::nchw, 2, 3, 5};
  cudaSetDevice(0);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.forward(layer, elsewhere);
        }).find("the stream is of device 1, the memory of the layer is on 0") != std::string::npos);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          layer.forward(other.view, step.y.view, on);
        }).find("x is memory of device 1, expected of 0") != std::string::npos);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.backward(layer, on);
        }).find("there was no forward pass") != std::string::npos);
  fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
  CHECK_THROWS_AS((layer_over<syncnorm::self_communicator>{{}, 3}), syncnorm::cuda_error);
  CHECK(cudaGetLastError() == cudaSuccess); // it was thrown
  fake_cuda::fail_next("cudaStreamGetDevice", cudaErrorCallRequiresNewerDriver);
  step.forward(layer, on);
  layer.synchronize(on);
}

TEST_CASE("what is prepared and reserved is for the device of the layer, whichever is current") {
  test::unload_kernels();
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    step_memory step;
    test::stream const on;
    cudaSetDevice(1);
    layer.prepare(on);
    layer.reserve_double_backward();
    layer.reserve_in_place(step.x.view, {0}, 0, on);
    layer.reserve_in_place({&step.x.view, 1}, {}, 3, on);
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK(current == 1);
    cudaSetDevice(0);
    for (void const* const memory : {layer.kept().memory().elements, static_cast<void*>(layer.kept().memory().state)}) {
      cudaPointerAttributes found{};
      CHECK(cudaPointerGetAttributes(&found, memory) == cudaSuccess);
      CHECK(found.device == 0);
    }
    step.forward(layer, on), step.backward(layer, on);
    layer.double_backward({}, step.x.view, step.dy.view, step.dx.view, {}, step.epilogue, {}, on);
    layer.synchronize(on);
  });
  test::check_no_first_launches();
}

TEST_CASE("a pass leaves the capture of another stream by the same thread as it is") {
  layer_over<syncnorm::self_communicator> layer{{}, 3};
  step_memory step;
  test::stream const on, other;
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal) == cudaSuccess);
  step.forward(layer, on);
  CHECK(cudaStreamEndCapture(other, &graph) == cudaSuccess);
  cudaGraphDestroy(graph);
  layer.synchronize(on);
}

TEST_CASE("an error of NCCL comes up in the layer, too") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    layer.synchronize(on);
    fake_nccl::set_async_error(comm.native_handle(), ncclRemoteError);
    CHECK_THROWS_AS(layer.check(), syncnorm::nccl_error);
    CHECK_THROWS_AS(step.forward(layer, on), syncnorm::nccl_error);
    on.wait();
  });
}

namespace {

/// Passes of 3 channels without a layer.
template <class C>
struct loose_passes {
  C comm;
  cuda::device_limits limits = cuda::current_limits();
  cuda::batch_norm_workspace workspace{3, syncnorm::size(comm), limits, cuda::workspace_bytes(3, limits)};
  step_memory memory{};
  test::stream on{};

  void forward(cuda::batch_norm_saved& saved) {
    syncnorm::tensor_view<float const> const x = memory.x.view;
    cuda::detail::forward<test::simt_kernels, float, float>(
        comm, {{&x, 1}, {&memory.y.view, 1}, {}, {}, syncnorm::statistics_scope::all_ranks}, {}, saved, workspace, on);
  }
};

} // namespace

TEST_CASE("what a pass leaves, and its workspace, have to be as large as it takes") {
  using syncnorm::self_communicator;
  loose_passes<self_communicator> one{{}};
  cuda::batch_norm_saved fitting{3}, other{2};
  one.forward(fitting);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { one.forward(other); }) ==
        "batch_norm forward: what a forward pass leaves is for 2 channels, expected 3");
  test::over_nccl(2, [](auto const& comm) {
    loose_passes<std::remove_cvref_t<decltype(comm)>> passes{comm};
    cuda::batch_norm_saved saved{comm.rank() == 1 ? 5 : 3};
    auto const said = test::thrown<syncnorm::invalid_argument_error>([&] {
      passes.forward(saved);
      passes.on.wait();
      passes.workspace.raise();
    });
    CHECK(said == "batch_norm forward: rank 1: what a forward pass leaves is for 5 channels, expected 3");
  });
  auto const needed = cuda::workspace_bytes(3, one.limits);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          cuda::batch_norm_workspace{3, 1, one.limits, needed - 1};
        }) == "batch_norm_workspace: the kernels' workspace has " + std::to_string(needed - 1) +
                  " bytes, expected at least " + std::to_string(needed));
  test::check_no_violations();
}
