#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>

#include "cuda/device_buffer.hpp"
#include "ops/grid_case.hpp"
#include "support/epilogue_oracle.hpp"
#include "support/sanitized.hpp"
#include "support/worse_of.hpp"

// Passes of a layer on a device over a few ranks against the oracle, on whatever runs its kernels. Every rank calls these.
namespace layer_cases {

/// `[N, C, S]` in device memory, as a layout says.
template <class T>
struct device_tensor {
  test::owned_tensor<T> host;
  test::device_buffer<T> memory;
  syncnorm::tensor_view<T> view;

  device_tensor(test::layout order, std::int64_t n, std::int64_t c, std::int64_t s)
      : host{order, n, c, s}, memory{host.storage.size()}, view{host.view} {
    if (view.size() == 0) view.data = nullptr;
    if (view.data != nullptr) view.data = memory.data() + (host.view.data - host.storage.data());
    memory.put(host.storage);
  }

  /// Samples from `first` on of a batch `[·, C, S]`.
  void put(std::vector<long double> const& batch, std::int64_t first) {
    auto i = static_cast<std::size_t>(first * view.channels * view.spatial);
    each([&](T& value) { value = syncnorm::from_double<T>(static_cast<double>(batch[i++])); });
    memory.put(host.storage);
  }
  [[nodiscard]] std::vector<long double> get() {
    std::vector<long double> values;
    std::ranges::copy(memory.get(), host.storage.begin());
    each([&](T& value) { values.push_back(syncnorm::as_double(value)); });
    return values;
  }

private:
  template <class F>
  void each(F const& f) {
    for (std::int64_t n = 0; n < view.samples; ++n)
      for (std::int64_t c = 0; c < view.channels; ++c)
        for (std::int64_t s = 0; s < view.spatial; ++s) f(host.view(n, c, s));
  }
};

struct layer_case {
  std::vector<std::int64_t> samples; ///< of the ranks, as many as there are; more are left out
  std::int64_t channels = 3, spatial = 20;
  test::layout order = test::layout::nchw;
  bool masked = false, residual = false;
  double slope = 1;
  syncnorm::masked_outputs outputs = syncnorm::masked_outputs::normalized;
  std::optional<double> momentum = 0.1;
  syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic;
  syncnorm::batch_variance normalize_by = syncnorm::batch_variance::biased;
  bool exponential = false;

  [[nodiscard]] syncnorm::activation activation() const { return {slope, exponential}; }
  [[nodiscard]] syncnorm::batch_norm_options norm() const {
    return {.momentum = momentum, .exchange = policy, .normalize_by = normalize_by};
  }
};

template <class T>
std::vector<std::remove_const_t<T>> get(std::span<T> values) {
  std::vector<std::remove_const_t<T>> all(values.size());
  if (!all.empty())
    syncnorm::detail::require_cuda(cudaMemcpy(all.data(), values.data(), values.size_bytes(), cudaMemcpyDeviceToHost),
                                   "get");
  return all;
}

template <class P>
void put(std::span<P> to, std::vector<long double> const& values) {
  std::vector<P> const all(values.begin(), values.end());
  test::copy_to_device(to.data(), all.data(), to.size_bytes());
}

/// The largest difference, by the scale of what is expected; infinite where one is no number.
template <class A, class B>
double error_of(std::vector<A> const& found, std::vector<B> const& expected) {
  if (found.size() != expected.size()) return std::numeric_limits<double>::infinity();
  long double scale = 1, most = 0;
  for (auto const& value : expected) scale = std::max(scale, std::abs(static_cast<long double>(value)));
  for (std::size_t i = 0; i < found.size(); ++i) {
    long double const difference = std::abs(static_cast<long double>(found[i]) - static_cast<long double>(expected[i]));
    most = test::worse_of(most, difference);
  }
  return static_cast<double>(most / scale);
}

/// Two steps over the same batch, forward and backward, enqueued or captured once and replayed twice.
template <class Layer, class T = float, class C>
void check_steps(C const& comm, layer_case const& of, bool captured, double accuracy = 1e-5) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  std::int64_t first = 0, all = 0;
  for (int r = 0; r < size; ++r) {
    if (r < rank) first += of.samples[static_cast<std::size_t>(r)];
    all += of.samples[static_cast<std::size_t>(r)];
  }
  auto const own = of.samples[static_cast<std::size_t>(rank)];
  auto const c = of.channels, s = of.spatial;
  INFO("rank ", rank, " of ", size, ", C ", c, ", S ", s, ", layout ", static_cast<int>(of.order), ", own N ", own,
       ", of all ", all, std::string{captured ? ", captured" : ""});

  auto const batch = [&](std::uint64_t stream, double center) {
    std::vector<long double> values(static_cast<std::size_t>(all * c * s));
    for (std::size_t i = 0; i < values.size(); ++i) // as an element holds it
      values[i] = syncnorm::as_double(syncnorm::from_double<T>(center + test::noise(stream, i)));
    return values;
  };
  test::epilogue_oracle oracle{all, c,  s, batch(1, 5), std::vector<long double>(static_cast<std::size_t>(c), 1),
                               {},  {}, {}};
  oracle.beta.assign(static_cast<std::size_t>(c), 0);
  if (of.residual) oracle.residual = batch(2, 0);
  if (of.masked)
    for (std::int64_t i = 0; i < all * s; ++i)
      oracle.mask.push_back(test::noise(3, static_cast<std::uint64_t>(i)) > -0.5);
  oracle.zeroes = of.outputs == syncnorm::masked_outputs::zero;
  oracle.slope = of.slope, oracle.exponential = of.exponential;
  oracle.eps = 1e-5L;
  oracle.unbiased = of.normalize_by == syncnorm::batch_variance::unbiased;
  oracle.forward();
  auto dy_all = batch(4, 0.25);
  if (of.slope != 1) // on whichever side of the kink rounding has put it, nothing follows
    oracle.for_each_near_kink(1e-4L, [&](std::size_t i) { dy_all[i] = 0; });
  auto const gradients = oracle.backward(dy_all, first, first + own);

  device_tensor<T> x{of.order, own, c, s}, y{of.order, own, c, s}, dy{of.order, own, c, s}, dx{of.order, own, c, s},
      residual{of.order, own, c, s}, dresidual{of.order, own, c, s};
  x.put(oracle.x, first), dy.put(dy_all, first);
  if (of.residual) residual.put(oracle.residual, first);
  auto const bytes = [&] {
    auto const from = of.masked ? oracle.mask.begin() + first * s : oracle.mask.begin();
    return std::vector<std::uint8_t>(from, of.masked ? from + own * s : from);
  }();
  test::device_buffer<std::uint8_t> const mask{bytes};
  syncnorm::batch_norm_epilogue<T> epilogue;
  epilogue.activation = of.activation();
  epilogue.masked = of.outputs;
  if (of.residual) epilogue.residual = residual.view;
  if (of.masked) epilogue.mask = syncnorm::mask_of(mask.data(), own, s);

  Layer layer{comm, c, {.norm = of.norm()}};
  test::stream const on;
  std::span const saved{layer.saved().statistics().mean, static_cast<std::size_t>(c)};
  test::device_buffer<double> const means{saved.size() * static_cast<std::size_t>(size)};
  test::meetings const between{comm};
  auto const step = [&](cudaStream_t stream) {
    layer.forward(x.view, y.view, epilogue, stream);
    layer.backward(x.view, dy.view, dx.view, epilogue, of.residual ? dresidual.view : syncnorm::tensor_view<T>{}, {},
                   stream);
  };
  if (captured) layer.prepare(on);
  test::run_on(on, captured, step, 2);
  layer.synchronize(on);

  auto const part = [&](std::vector<long double> const& values) {
    auto const from = values.begin() + first * c * s;
    return std::vector<long double>(from, from + own * c * s);
  };
  CHECK(error_of(y.get(), part(oracle.y)) < accuracy);
  CHECK(error_of(dx.get(), part(gradients.dx)) < accuracy);
  if (of.residual) CHECK(error_of(dresidual.get(), part(gradients.dresidual)) < accuracy);

  auto const twice = [](std::vector<long double> values) {
    for (auto& value : values) value *= 2;
    return values;
  };
  CHECK(error_of(get(layer.gamma_grad()), twice(gradients.gamma)) < accuracy);
  CHECK(error_of(get(layer.beta_grad()), twice(gradients.beta)) < accuracy);
  std::vector<long double> mean(static_cast<std::size_t>(c), 0), var(mean.size(), 1);
  for (int k = 0; k < 2 && oracle.count > 0; ++k) {
    long double const weight = of.momentum ? static_cast<long double>(*of.momentum) : 1.0L / (k + 1);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i] += weight * (oracle.mean[i] - mean[i]);
      var[i] += weight * (oracle.m2[i] / static_cast<long double>(oracle.count - 1) - var[i]);
    }
  }
  CHECK(error_of(get(layer.running_mean()), mean) < accuracy);
  CHECK(error_of(get(layer.running_var()), var) < accuracy);
  CHECK(get(std::span{layer.num_batches_tracked(), 1}) == std::vector<std::int64_t>{oracle.count > 0 ? 2 : 0});

  if (size > 1) { // the same bits on every rank
    test::run_on(on, false, [&](cudaStream_t stream) { syncnorm::allgather(comm, saved, means.span(), stream); });
    auto const each = means.get();
    for (std::size_t i = saved.size(); i < each.size(); ++i) CHECK(each[i] == each[i - saved.size()]);
  }

  // Evaluation, and its gradient.
  layer.eval();
  layer.zero_grad(on);
  test::run_on(on, captured, step);
  layer.synchronize(on);
  oracle.mean = mean;
  for (std::size_t i = 0; i < var.size(); ++i) oracle.inv_std[i] = 1 / std::sqrt(var[i] + oracle.eps);
  oracle.constant_statistics();
  auto const constant = oracle.backward(dy_all, first, first + own);
  CHECK(error_of(y.get(), part(oracle.y)) < accuracy);
  auto found = dx.get(), found_residual = dresidual.get();
  bool near_kink = false;
  if (of.slope != 1)
    oracle.for_each_near_kink(1e-4L, [&](std::size_t i) { // which is elsewhere now
      auto const at = static_cast<std::int64_t>(i) - first * c * s;
      if (at < 0 || at >= own * c * s) return;
      near_kink = true;
      found[static_cast<std::size_t>(at)] = constant.dx[i];
      if (of.residual) found_residual[static_cast<std::size_t>(at)] = constant.dresidual[i];
    });
  CHECK(error_of(found, part(constant.dx)) < accuracy);
  if (of.residual) CHECK(error_of(found_residual, part(constant.dresidual)) < accuracy);
  if (near_kink) return;
  CHECK(error_of(get(layer.gamma_grad()), constant.gamma) < accuracy);
  CHECK(error_of(get(layer.beta_grad()), constant.beta) < accuracy);
}

/// What is promised of results in T, relative to their scale, and of 16 bits that they are rounded once more.
template <class T>
inline constexpr double accuracy_in = 1e-5;
template <>
inline constexpr double accuracy_in<double> = 1e-12;
template <>
inline constexpr double accuracy_in<__half> = 1e-5 + 0x1p-11;
template <>
inline constexpr double accuracy_in<__nv_bfloat16> = 1e-5 + 0x1p-8;

/// The cases that every way of running a layer goes through.
inline std::vector<layer_case> cases() {
  using test::layout;
  layer_case unbiased{{3, 1, 2}, 6, 5, layout::nhwc};
  unbiased.normalize_by = syncnorm::batch_variance::unbiased;
  layer_case elu{{3, 1, 2}, 5, 9, layout::nchw, true, true, 0.75};
  elu.exponential = true;
  return {unbiased,
          elu,
          {{3, 2, 4}},
          {{2, 0, 3}, 5, 7, layout::nhwc},
          {{0, 4, 0}, 37, 1, layout::nc, false, false, 1, syncnorm::masked_outputs::normalized, {}},
          {{2, 1, 2}, 2, 131, layout::strided},
          {{0, 0, 0}},
          {{64, 9, 0}, 8, 0},
          {{9, 1, 12}, 8, 7, layout::nchw, false, true, 0.25}, // rows that are columns
          {{3, 2, 0}, 4, 9, layout::tbc, true, true, 0, syncnorm::masked_outputs::zero},
          {{1, 2, 2}, 3, 33, layout::nchw, true, false, 0.1}};
}

/// Steps of each case, where ranks for which it has no batch have one sample.
template <class Layer, class T = float, class C>
void check_cases(C const& comm, bool captured) {
  for (auto of : cases()) {
    while (of.samples.size() < static_cast<std::size_t>(syncnorm::size(comm))) of.samples.push_back(1);
    check_steps<Layer, T>(comm, of, captured, accuracy_in<T>);
  }
}

/// Where all elements of all ranks are equal and eps is 0, mean is they, inv_std 0, y beta and dx 0, in training and in evaluation by
/// a variance or a standard deviation of 0. Rank r has n + r samples. Where ranks reduce, the mean is a sum, and rounded.
template <class Layer, class T = float, class C>
void check_equal_elements(C const& comm, bool captured,
                          syncnorm::exchange_policy policy = syncnorm::exchange_policy::gather) {
  struct extents {
    std::int64_t n, c, s;
  };
  for (auto const& of : {extents{2, 3, 5}, {8, 3, 49}, {7, 17, 13}, {9, 2, 300}})
    for (auto const order : {test::layout::nchw, test::layout::nhwc, test::layout::strided})
      for (double const number : {0.1, 0.7, 1.0 / 3}) {
        if (test::sanitized && number != 0.7) continue;
        auto const kind =
            number == 0.7 ? syncnorm::running_variance::standard_deviation : syncnorm::running_variance::unbiased;
        auto const n = of.n + syncnorm::rank(comm);
        INFO("N ", n, ", C ", of.c, ", S ", of.s, ", layout ", static_cast<int>(order), ", all ", number);
        auto const value = syncnorm::as_double(syncnorm::from_double<T>(number));
        auto const elements = static_cast<std::size_t>(n * of.c * of.s), channels = static_cast<std::size_t>(of.c);
        device_tensor<T> x{order, n, of.c, of.s}, y{order, n, of.c, of.s}, dy{order, n, of.c, of.s};
        x.put(std::vector<long double>(elements, value), 0), dy.put(std::vector<long double>(elements, 2), 0);
        Layer layer{comm, of.c, {.norm = {.eps = 0, .momentum = 1, .variance = kind, .exchange = policy}}};
        put(layer.beta(), std::vector<long double>(channels, 0.5L));
        test::stream const on;
        for (bool const training : {true, false}) {
          CAPTURE(training);
          layer.train(training);
          layer.prepare(on);
          test::run_on(on, captured, [&](cudaStream_t stream) { layer.forward(x.view, y.view, stream); });
          layer.synchronize(on);
          auto const saved = layer.saved().statistics();
          auto const mean = get(std::span{saved.mean, channels});
          if (policy == syncnorm::exchange_policy::gather) CHECK(mean == std::vector<double>(channels, value));
          CHECK(error_of(mean, std::vector<double>(channels, value)) < 1e-15);
          CHECK(get(std::span{saved.inv_std, channels}) == std::vector<double>(channels, 0));
          CHECK(y.get() == std::vector<long double>(elements, 0.5));
          test::run_on(on, captured, [&](cudaStream_t stream) { layer.backward(x.view, dy.view, y.view, stream); });
          layer.synchronize(on);
          CHECK(y.get() == std::vector<long double>(elements, 0));
        }
      }
}

} // namespace layer_cases
