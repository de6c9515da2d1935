#include "ops/cuda_step.hpp"

#include <chrono>
#include <string>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

namespace {

namespace cuda = syncnorm::cuda;
using invalid = syncnorm::invalid_argument_error;
using layer_alone = test::layer_over<syncnorm::self_communicator>;
using layer_over_nccl = test::layer_over<test::nccl_communicator>;
using test::step_memory;

bool says(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

/// `capture` while `on` is being captured.
template <class F>
void while_captured(test::stream const& on, F const& capture) {
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  capture();
  CHECK(cudaStreamEndCapture(on, &graph) == cudaSuccess);
  cudaGraphDestroy(graph);
}

} // namespace

TEST_CASE("options that are wrong on one rank are an error on every rank of a device, and in evaluation there") {
  test::over_nccl(2, [](auto const& comm) {
    for (double const momentum : {1.5, -0.5})
      for (bool const prepares : {false, true}) {
        layer_over_nccl layer{comm, 3, {.norm = {.momentum = comm.rank() == 1 ? momentum : 0.1}}};
        test::stream const on;
        step_memory step;
        auto const said = test::thrown<invalid>([&] {
          prepares ? layer.prepare(on) : step.forward(layer, on);
          layer.synchronize(on);
        });
        CHECK_MESSAGE(says(said, "rank 1: momentum is "), said);
      }
  });
  layer_alone one{{}, 3, {.norm = {.eps = -1}}};
  one.eval();
  test::stream const on;
  step_memory step;
  CHECK(says(test::thrown<invalid>([&] { step.forward(one, on); }), "eps is -1"));
}

TEST_CASE("a residual of the host, and gradients of residuals that are not there, are errors on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    bool const here = comm.rank() == 1;
    layer_over_nccl layer{comm, 3};
    test::stream const on;
    step_memory step;
    layer_cases::device_tensor<float> other{test::layout::nchw, 2, 3, 5};
    auto const refused = [&](std::string const& part, auto const& pass) {
      auto const said = test::thrown<invalid>([&] {
        pass();
        layer.synchronize(on);
      });
      CHECK_MESSAGE(says(said, "rank 1: " + part), said);
    };
    step.forward(layer, on), step.backward(layer, on), layer.synchronize(on);
    if (here) step.epilogue.residual = syncnorm::nchw<float const>(step.on_host.data(), 2, 3, 5);
    refused("the residual is memory of the host, expected of device 0", [&] { step.forward(layer, on); });
    step.epilogue.residual = {};
    step.forward(layer, on), layer.synchronize(on);
    refused("the gradient of a residual is asked for", [&] {
      layer.backward(step.x.view, step.dy.view, step.dx.view, {}, here ? other.view : syncnorm::tensor_view<float>{},
                     {}, on);
    });
    step.backward(layer, on), layer.synchronize(on);
    refused("there is a gradient with respect to dresidual, but no residual", [&] {
      syncnorm::tensor_view<float const> const v = here ? step.dy.view : syncnorm::tensor_view<float>{};
      layer.double_backward({.dresidual = v}, step.x.view, step.dy.view, other.view, {}, {}, {}, on);
    });
  });
  test::check_no_violations();
}

TEST_CASE("a frozen layer of a group whose operands are wrong on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over_nccl trained{comm, 3}, frozen{comm, 3};
    frozen.freeze_statistics();
    cuda::batch_norm_group<test::nccl_communicator> group{comm};
    test::stream const on;
    step_memory a, b;
    auto const run = [&](syncnorm::tensor_view<float> const& x) {
      group.run(cuda::passes(trained.plan_forward(a.x.view, a.y.view), frozen.plan_forward(x, b.y.view)), on);
      group.synchronize(on);
    };
    run(b.x.view);
    auto const before = test::state_of(trained);
    auto null = b.x.view;
    if (comm.rank() == 1) null.data = nullptr;
    auto const said = test::thrown<invalid>([&] { run(null); });
    CHECK_MESSAGE(says(said, "of layer 1: rank 1: x is null"), said);
    CHECK(test::state_of(trained) == before);
  });
}

TEST_CASE("what failed alone, in a group or between two phases, leaves nothing for a backward pass") {
  layer_alone first{{}, 3}, second{{}, 3};
  cuda::batch_norm_group<syncnorm::self_communicator> group{syncnorm::self_communicator{}};
  test::stream const on;
  step_memory a, b;
  a.forward(first, on), b.forward(second, on), on.wait();
  auto null = b.x.view;
  null.data = nullptr;
  CHECK_THROWS_AS(
      group.run(cuda::passes(first.plan_forward(a.x.view, a.y.view), second.plan_forward(null, b.y.view)), on),
      invalid);
  CHECK(says(test::thrown<invalid>([&] { a.backward(first, on); }), "there was no forward pass"));

  a.forward(first, on), on.wait();
  auto backward = first.begin_backward(a.x.view, a.dy.view, a.dx.view, on);
  CHECK_THROWS_AS(first.forward(null, a.y.view, on), invalid);
  CHECK(says(test::thrown<invalid>([&] { backward.finish(on); }), "another forward pass since"));
}

TEST_CASE("a pass in two phases is not captured over a communicator of the host") {
  test::over_threads(2, [](auto const& comm) {
    test::layer_over<test::staged_threads> layer{comm, 3};
    test::stream const on;
    step_memory step;
    layer.prepare(on);
    while_captured(on, [&] {
      auto const said = test::thrown<invalid>([&] { (void)layer.begin_forward(step.x.view, step.y.view, on); });
      CHECK_MESSAGE(says(said, "the exchange of this communicator cannot be"), said);
    });
  });
}

TEST_CASE("a pass in two phases that is dropped gives its memory to the next, in a graph, too") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over_nccl layer{comm, 3};
    test::stream const on;
    step_memory step;
    layer.prepare(on);
    { auto const dropped = layer.begin_forward(step.x.view, step.y.view, on); }
    layer.synchronize(on);
    while_captured(on, [&] { CHECK_NOTHROW(layer.begin_forward(step.x.view, step.y.view, on).finish(on)); });
  });
}

TEST_CASE("a peer that never comes to prepare is a timeout") {
  auto const raw = fake_nccl::make_group(2);
  auto const comm = test::nccl_communicator::adopt(raw[0], std::chrono::milliseconds{100});
  layer_over_nccl layer{comm, 3};
  test::stream const on;
  CHECK_THROWS_AS(layer.prepare(on), syncnorm::timeout_error);
  ncclCommDestroy(raw[1]);
}
