#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

#include "cuda/layer_cases.hpp"

// Passes of layers on a device in two phases and in groups, on whatever runs their kernels.
namespace layer_cases {

namespace cuda = syncnorm::cuda;

/// A layer and the tensors of its step; rank r has 2 + r samples.
template <class Layer, class C>
struct pending_data {
  Layer layer;
  std::int64_t samples, channels;
  device_tensor<float> x, y, dy, dx;

  pending_data(C const& comm, std::int64_t channels_,
               syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic)
      : layer{comm, channels_, {.norm = {.exchange = policy}}}, samples{2 + syncnorm::rank(comm)}, channels{channels_},
        x{test::layout::nchw, samples, channels, 5}, y{test::layout::nhwc, samples, channels, 5},
        dy{test::layout::nchw, samples, channels, 5}, dx{test::layout::nchw, samples, channels, 5} {
    std::vector<long double> values(static_cast<std::size_t>(samples * channels * 5));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = test::noise(static_cast<std::uint64_t>(syncnorm::rank(comm)), i);
    x.put(values, 0);
    dy.put({values.rbegin(), values.rend()}, 0);
    y.put(std::vector<long double>(values.size(), -5), 0), dx.put(std::vector<long double>(values.size(), -6), 0);
  }

  void step(cudaStream_t on) {
    layer.forward(x.view, y.view, on);
    layer.backward(x.view, dy.view, dx.view, on);
  }
  cuda::pending_passes begin_forward(cudaStream_t on) { return layer.begin_forward(x.view, y.view, {}, on); }
  cuda::pending_passes begin_backward(cudaStream_t on) { return layer.begin_backward(x.view, dy.view, dx.view, on); }
  cuda::batch_norm_pass plan_forward() { return layer.plan_forward(x.view, y.view); }
  cuda::batch_norm_pass plan_backward() { return layer.plan_backward(x.view, dy.view, dx.view); }
  /// All that a failed pass must leave as it was; not while the stream has work.
  std::vector<float> results() {
    std::vector<float> all{static_cast<float>(get(std::span{layer.num_batches_tracked(), 1})[0])};
    for (auto const values : {layer.running_mean(), layer.running_var(), layer.gamma_grad(), layer.beta_grad()}) {
      auto const some = get(values);
      all.insert(all.end(), some.begin(), some.end());
    }
    for (auto* const tensor : {&y, &dx})
      for (auto const value : tensor->get()) all.push_back(static_cast<float>(value));
    return all;
  }
};

/// Two steps of two layers in two phases, each rank in an order of its own, give the bits of steps in one; the second is
/// perhaps replayed. `after_first()`: after the first step. Every rank calls it.
template <class Layer, class C, class F>
void check_two_phases(C const& comm, bool captured, F const& after_first,
                      syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  test::stream const on, other;
  pending_data<Layer, C> a{comm, 3, policy}, b{comm, 6, policy}, expected_a{comm, 3, policy},
      expected_b{comm, 6, policy};
  test::meetings const between{comm};
  bool const odd = syncnorm::rank(comm) % 2 == 1;
  auto const step = [&](cudaStream_t stream) {
    auto of_a = a.begin_forward(stream), of_b = b.begin_forward(stream);
    (odd ? of_b : of_a).finish(stream);
    (odd ? of_a : of_b).finish(stream);
    auto back = b.begin_backward(stream);
    a.layer.backward(a.x.view, a.dy.view, a.dx.view, stream); // while another is pending
    auto moved = std::move(back);
    moved.finish(stream);
    CHECK_THROWS_AS(moved.finish(stream), syncnorm::invalid_argument_error);
  };
  step(on);
  on.wait();
  after_first();
  test::run_on(on, captured, step, 1);
  for (int i = 0; i < 2; ++i) expected_a.step(other), expected_b.step(other);
  for (auto* const each : {&a, &b}) each->layer.synchronize(on);
  for (auto* const each : {&expected_a, &expected_b}) each->layer.synchronize(other);
  CHECK(a.results() == expected_a.results());
  CHECK(b.results() == expected_b.results());
}

/// Two steps of a group of three layers, one of which has frozen statistics, give the bits of each alone; the second is
/// perhaps replayed. Every rank calls it.
template <class Layer, class C>
void check_group(C const& comm, bool captured,
                 syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  test::stream const on, other;
  pending_data<Layer, C> a{comm, 3, policy}, b{comm, 6, policy}, frozen{comm, 2, policy}, expected_a{comm, 3, policy},
      expected_b{comm, 6, policy}, expected_frozen{comm, 2, policy};
  cuda::batch_norm_group<C> group{comm};
  test::meetings const between{comm};
  frozen.layer.freeze_statistics(), expected_frozen.layer.freeze_statistics();
  auto const step = [&](cudaStream_t stream) {
    group.run(cuda::passes(a.plan_forward(), frozen.plan_forward(), b.plan_forward()), stream);
    group.begin(cuda::passes(a.plan_backward(), frozen.plan_backward(), b.plan_backward()), stream).finish(stream);
  };
  step(on);
  group.synchronize(on);
  test::run_on(on, captured, step, 1);
  group.synchronize(on);
  for (int i = 0; i < 2; ++i)
    for (auto* const each : {&expected_a, &expected_b, &expected_frozen}) each->step(other);
  for (auto* const each : {&expected_a, &expected_b, &expected_frozen}) each->layer.synchronize(other);
  CHECK(a.results() == expected_a.results());
  CHECK(b.results() == expected_b.results());
  CHECK(frozen.results() == expected_frozen.results());
}

} // namespace layer_cases
