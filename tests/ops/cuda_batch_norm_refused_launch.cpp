#include "ops/cuda_step.hpp"

#include <string>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include "cuda/pending_cases.hpp"

// A device for which there is no code: CUDA refuses to load its kernels, or to launch them.
namespace {

using test::layer_over;
using test::state_of;
using test::step_memory;

/// `act` on every rank, of which rank 1 is refused its next call of `function`. That rank throws what CUDA said; the others, by their next
/// `synchronize`, that it did.
template <class Layer, class C, class F>
void check_refused(Layer& layer, C const& comm, test::stream const& on, std::string const& function,
                   std::string const& pass, F const& act) {
  bool const here = comm.rank() == 1;
  on.wait();
  auto const before = state_of(layer);
  if (here) fake_cuda::fail_next(function, cudaErrorInvalidValue);
  std::string const said = test::thrown<syncnorm::error>([&] {
    act();
    layer.synchronize(on);
  });
  if (here)
    CHECK(said.starts_with("cuda: "));
  else
    CHECK(said.starts_with(pass + ": rank 1: cuda: "));
  CHECK(said.ends_with("fake error (cudaErrorFake)"));
  on.wait();
  CHECK(state_of(layer) == before);
}

/// The ranks are still in step, and have said what there is to say.
template <class Layer, class F>
void check_nothing_to_go_back_from(Layer& layer, test::stream const& on, F const& backward) {
  auto const before = state_of(layer);
  backward();
  layer.synchronize(on);
  CHECK(state_of(layer) == before);
}

template <class C>
void check_layer(C const& comm, syncnorm::exchange_policy policy) {
  layer_over<C> layer{comm, 3, {.norm = {.exchange = policy}}};
  test::stream const on;
  step_memory step;
  if (comm.rank() == 1) fake_cuda::fail_next("cudaFuncGetAttributes", cudaErrorInvalidValue);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { layer.prepare(on); }) ==
        "batch_norm forward: rank 1: cuda: cudaFuncGetAttributes: fake error (cudaErrorFake)");
  layer.prepare(on);
  for (int times = 0; times < 2; ++times) {
    auto const y = step.y.get();
    check_refused(layer, comm, on, "kernel", "batch_norm forward", [&] { step.forward(layer, on); });
    CHECK(step.y.get() == y);
    check_nothing_to_go_back_from(layer, on, [&] { step.backward(layer, on); });
    step.forward(layer, on);
    auto const dx = step.dx.get();
    check_refused(layer, comm, on, "kernel", "batch_norm backward", [&] { step.backward(layer, on); });
    CHECK(step.dx.get() == dx);
    step.backward(layer, on);
    layer.synchronize(on);
  }
}

template <class C>
void check_two_phases(C const& comm, syncnorm::exchange_policy policy) {
  layer_cases::pending_data<layer_over<C>, C> data{comm, 3, policy};
  test::stream const on;
  data.step(on);
  data.layer.synchronize(on);
  check_refused(data.layer, comm, on, "kernel", "batch_norm forward", [&] { data.begin_forward(on).finish(on); });
  check_nothing_to_go_back_from(data.layer, on,
                                [&] { data.layer.backward(data.x.view, data.dy.view, data.dx.view, on); });
  data.layer.forward(data.x.view, data.y.view, on);
  check_refused(data.layer, comm, on, "kernel", "batch_norm backward", [&] { data.begin_backward(on).finish(on); });
  data.step(on);
  data.layer.synchronize(on);
}

/// Rank 1 is refused a kernel of `forward` after so many, the packets being under way; the others complete it, or hear that sums are
/// missing (`lost`). The backward pass after it fails on every rank and leaves the layer as it was, and then all go on.
template <class Layer, class C, class Forward, class Backward>
void check_refused_after_the_exchange(Layer& layer, C const& comm, test::stream const& on, int after, bool lost,
                                      Forward const& forward, Backward const& backward) {
  bool const here = comm.rank() == 1;
  on.wait();
  if (here) fake_cuda::fail_next("kernel", cudaErrorInvalidValue, after);
  std::string const said = test::thrown<syncnorm::error>([&] {
    forward();
    layer.synchronize(on);
  });
  if (here)
    CHECK(said.starts_with("cuda: "));
  else if (lost)
    CHECK(said.starts_with("exchange: sums have not come from all ranks"));
  else
    CHECK(said.empty());
  on.wait();
  auto const before = state_of(layer);
  std::string const then = test::thrown<syncnorm::error>([&] {
    backward();
    layer.synchronize(on);
  });
  CHECK(then.starts_with("batch_norm backward: rank "));
  CHECK(test_support::contains(then, "rank 1: there was no forward pass"));
  on.wait();
  CHECK(state_of(layer) == before);
  for (int times = 0; times < 2; ++times) {
    auto const tracked = state_of(layer)[0];
    forward();
    backward();
    layer.synchronize(on);
    CHECK(state_of(layer)[0] == tracked + 1);
  }
}

template <class C>
void check_after_the_exchange(C const& comm, syncnorm::exchange_policy policy) {
  bool const reduces = policy == syncnorm::exchange_policy::reduce;
  layer_over<C> layer{comm, 3, {.norm = {.exchange = policy}}};
  test::stream const on;
  step_memory step;
  layer.prepare(on);
  auto const forward = [&] { step.forward(layer, on); };
  auto const backward = [&] { step.backward(layer, on); };
  check_refused_after_the_exchange(layer, comm, on, 1, reduces, forward, backward);
  if (reduces) check_refused_after_the_exchange(layer, comm, on, 2, false, forward, backward);
}

template <class C>
void check_finish(C const& comm) {
  layer_cases::pending_data<layer_over<C>, C> data{comm, 3, syncnorm::exchange_policy::gather};
  test::stream const on;
  data.step(on);
  data.layer.synchronize(on);
  check_refused_after_the_exchange(
      data.layer, comm, on, 1, false, [&] { data.begin_forward(on).finish(on); },
      [&] { data.begin_backward(on).finish(on); });
}

} // namespace

TEST_CASE("a kernel that CUDA refuses on one rank after the exchange leaves the ranks in step") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(3, [&](auto const& comm) { check_after_the_exchange(comm, policy); });
  test::over_nccl(2, [&](auto const& comm) { check_finish(comm); });
  test::over_threads(2, [&](auto const& comm) { check_after_the_exchange(comm, syncnorm::exchange_policy::gather); });
  test::check_no_violations();
}

TEST_CASE("a forward pass that meets the backward pass of a failed one on another rank is an error on both") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<syncnorm::nccl_communicator> layer{comm, 3, {.norm = {.exchange = syncnorm::exchange_policy::gather}}};
    test::stream const on;
    step_memory step;
    layer.prepare(on);
    check_refused(layer, comm, on, "kernel", "batch_norm forward", [&] { step.forward(layer, on); });
    auto const before = state_of(layer);
    std::string const said = test::thrown<syncnorm::error>([&] {
      comm.rank() == 0 ? step.backward(layer, on) : step.forward(layer, on);
      layer.synchronize(on);
    });
    CHECK(test_support::contains(said, "rank 0: the forward pass failed"));
    on.wait();
    CHECK(state_of(layer) == before);
    step.forward(layer, on);
    step.backward(layer, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

TEST_CASE("a kernel that CUDA refuses on one rank is an error on every rank, and nothing is written") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce}) {
    test::over_nccl(3, [&](auto const& comm) { check_layer(comm, policy); });
    test::over_nccl(3, [&](auto const& comm) { check_two_phases(comm, policy); });
  }
  test::over_threads(2, [&](auto const& comm) { check_layer(comm, syncnorm::exchange_policy::gather); });
  test::check_no_violations();
}

TEST_CASE("a kernel that CUDA refuses where there is one rank is an error at once, and nothing is written") {
  layer_over<syncnorm::self_communicator> layer{{}, 3};
  test::stream const on;
  step_memory step;
  auto const before = state_of(layer);
  auto const y = step.y.get();
  fake_cuda::fail_next("cudaFuncGetAttributes", cudaErrorInvalidValue);
  CHECK_THROWS_AS(layer.prepare(on), syncnorm::cuda_error);
  fake_cuda::fail_next("kernel", cudaErrorInvalidValue);
  CHECK_THROWS_AS(step.forward(layer, on), syncnorm::cuda_error);
  CHECK_THROWS_AS(step.backward(layer, on), syncnorm::invalid_argument_error);
  layer.synchronize(on);
  CHECK(state_of(layer) == before);
  CHECK(step.y.get() == y);
  step.forward(layer, on);
  step.backward(layer, on);
  layer.synchronize(on);
  test::check_no_violations();
}

TEST_CASE("a pass in two phases that cannot begin or finish leaves no statistics of the one before") {
  layer_cases::pending_data<layer_over<syncnorm::self_communicator>, syncnorm::self_communicator> data{{}, 3};
  test::stream const on;
  data.step(on);
  auto pending = data.begin_forward(on);
  fake_cuda::fail_next("kernel", cudaErrorInvalidValue);
  CHECK_THROWS_AS(pending.finish(on), syncnorm::cuda_error);
  CHECK_THROWS_AS(data.layer.backward(data.x.view, data.dy.view, data.dx.view, on), syncnorm::invalid_argument_error);
  data.step(on);
  data.layer.synchronize(on);
  auto const moved = std::move(pending);
  CHECK_THROWS_AS(pending.finish(on), syncnorm::invalid_argument_error); // NOLINT(bugprone-use-after-move)
  test::check_no_violations();
}
