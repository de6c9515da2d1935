#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

#include "cuda/layer_cases.hpp"

namespace test {

/// to[i] = 2·from[i], on a stream. A source for nvcc has it, or one over the stand-in for the CUDA runtime.
void double_values(double const* from, double* to, std::size_t n, cudaStream_t stream);

/// Two ranks, of which this one is both: the other does what it does. So one device has what else takes two: exchanges, which may
/// be captured, on whatever stream.
struct echo_communicator {
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 2; }

  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const {
    for (auto* const place : {out.data(), out.data() + in.size()})
      syncnorm::detail::require_cuda(
          cudaMemcpyAsync(place, in.data(), in.size_bytes(), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  void allreduce(std::span<double const> in, std::span<double> out, syncnorm::reduce_op op, CUstream_st* stream) const {
    if (op != syncnorm::reduce_op::sum) throw syncnorm::invalid_argument_error{"echo: only sums"};
    double_values(in.data(), out.data(), in.size(), stream);
  }
};

} // namespace test

namespace layer_cases {

/// How a step of two layers is run.
enum class step_kind : std::uint8_t { one_phase, two_phases, group };

/// Two steps of two layers over a rank that is both give what one rank comes to on the batch given twice; the second is perhaps
/// replayed. `EchoLayer` and `Alone`: the layer over `echo_communicator`, and over `self_communicator`.
template <class EchoLayer, class Alone>
void check_echo(step_kind kind, syncnorm::exchange_policy policy, bool captured) {
  INFO("kind ", static_cast<int>(kind), ", policy ", static_cast<int>(policy),
       std::string{captured ? ", captured" : ""});
  struct data {
    device_tensor<float> x, y, dy, dx;

    data(std::int64_t samples, std::int64_t channels, test::layout order)
        : x{order, samples, channels, 7}, y{order, samples, channels, 7}, dy{order, samples, channels, 7}, dx{order,
                                                                                                              samples,
                                                                                                              channels,
                                                                                                              7} {
      auto const n = static_cast<std::size_t>(samples * channels * 7),
                 of_three = static_cast<std::size_t>(3 * channels * 7);
      std::vector<long double> of_x(n), of_dy(n);
      for (std::size_t i = 0; i < n; ++i)
        of_x[i] = 3 + test::noise(1, i % of_three), of_dy[i] = test::noise(2, i % of_three);
      x.put(of_x, 0), dy.put(of_dy, 0);
    }
  };
  test::echo_communicator const comm;
  syncnorm::batch_norm_options options;
  options.exchange = policy;
  EchoLayer a{comm, 5, {.norm = options}}, b{comm, 16, {.norm = options}};
  Alone alone_a{{}, 5}, alone_b{{}, 16};
  data of_a{3, 5, test::layout::nchw}, of_b{3, 16, test::layout::nhwc};
  data twice_a{6, 5, test::layout::nchw}, twice_b{6, 16, test::layout::nhwc};
  syncnorm::cuda::batch_norm_group<test::echo_communicator> group{comm};
  auto const in_one = [](auto& layer, data& of, cudaStream_t on) {
    layer.forward(of.x.view, of.y.view, on);
    layer.backward(of.x.view, of.dy.view, of.dx.view, on);
  };
  auto const step = [&](cudaStream_t on) {
    if (kind == step_kind::one_phase) {
      in_one(a, of_a, on), in_one(b, of_b, on);
    } else if (kind == step_kind::two_phases) {
      auto first = a.begin_forward(of_a.x.view, of_a.y.view, {}, on),
           second = b.begin_forward(of_b.x.view, of_b.y.view, {}, on);
      second.finish(on), first.finish(on);
      auto back = a.begin_backward(of_a.x.view, of_a.dy.view, of_a.dx.view, on);
      b.backward(of_b.x.view, of_b.dy.view, of_b.dx.view, on);
      back.finish(on);
    } else {
      group.run(
          syncnorm::cuda::passes(a.plan_forward(of_a.x.view, of_a.y.view), b.plan_forward(of_b.x.view, of_b.y.view)),
          on);
      group.run(syncnorm::cuda::passes(a.plan_backward(of_a.x.view, of_a.dy.view, of_a.dx.view),
                                       b.plan_backward(of_b.x.view, of_b.dy.view, of_b.dx.view)),
                on);
    }
  };
  test::stream const on;
  step(on);
  for (auto* const each : {&a, &b}) each->synchronize(on);
  test::run_on(on, captured, step);
  for (auto* const each : {&a, &b}) each->synchronize(on);
  group.synchronize(on);
  for (int i = 0; i < 2; ++i) in_one(alone_a, twice_a, on), in_one(alone_b, twice_b, on);
  for (auto* const each : {&alone_a, &alone_b}) each->synchronize(on);

  auto const check = [&](EchoLayer& layer, Alone& expected, data& of, data& twice) {
    auto const first_half = [](std::vector<long double> values) {
      values.resize(values.size() / 2);
      return values;
    };
    CHECK(get(std::span{layer.num_batches_tracked(), 1})[0] == 2);
    CHECK(error_of(of.y.get(), first_half(twice.y.get())) < 1e-6);
    CHECK(error_of(of.dx.get(), first_half(twice.dx.get())) < 1e-6);
    CHECK(error_of(get(layer.running_mean()), get(expected.running_mean())) < 1e-6);
    CHECK(error_of(get(layer.running_var()), get(expected.running_var())) < 1e-6);
    auto gamma = get(expected.gamma_grad()), beta = get(expected.beta_grad()); // of both ranks
    for (auto* const both : {&gamma, &beta})
      for (auto& value : *both) value /= 2;
    CHECK(error_of(get(layer.gamma_grad()), gamma) < 1e-5);
    CHECK(error_of(get(layer.beta_grad()), beta) < 1e-5);
  };
  check(a, alone_a, of_a, twice_a);
  check(b, alone_b, of_b, twice_b);
}

template <class EchoLayer, class Alone>
void check_echoes() {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    for (auto const kind : {step_kind::one_phase, step_kind::two_phases, step_kind::group})
      for (bool const captured : {false, true}) check_echo<EchoLayer, Alone>(kind, policy, captured);
}

} // namespace layer_cases
