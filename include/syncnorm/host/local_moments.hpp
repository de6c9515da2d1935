#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/moments_kernel.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

namespace detail {

template <class T>
void plain_moments(executor_ref exec, tensor_view<T const> const& x, std::span<double> mean, std::span<double> m2) {
  groups const parts{x};
  moments_kernel<T> const kernel{x, parts};
  reduce_channels<accumulate_t<T>>(exec, parts, x.channels, reduction_chunk(x), kernel, {mean.data(), m2.data()});
}

template <class T>
void folded_moments(executor_ref exec, tensor_view<T const> const& x, std::span<double> mean, std::span<double> m2) {
  tensor_view<T const> const lanes = folded(x);
  auto const size = static_cast<std::size_t>(lanes.channels);
  scratch_lease<double> scratch{2 * lanes.channels};
  double* const lane_mean = scratch.data();
  double* const lane_m2 = lane_mean + size;
  plain_moments<T>(exec, lanes, {lane_mean, size}, {lane_m2, size});
  for (std::int64_t c = 0; c < x.channels; ++c) {
    moments<double> all;
    for (std::int64_t i = c * x.spatial; i < (c + 1) * x.spatial; ++i)
      all = merge(all, moments<double>{x.samples, lane_mean[i], lane_m2[i]});
    mean[static_cast<std::size_t>(c)] = all.mean;
    m2[static_cast<std::size_t>(c)] = all.m2;
  }
}

} // namespace detail

/// Moments of each channel: mean[c] and m2[c] = Σ (x − mean[c])² over its N·S elements, which `x.count()` counts.
/// Zeros where that is 0.
///
/// Shapes: x `[N, C, S]`, mean and m2 `[C]`. Local. The same bits whatever the executor.
template <class X>
requires element<X>
void local_moments(executor_ref exec, tensor_view<X> x, std::span<double> mean, std::span<double> m2) {
  using T = std::remove_const_t<X>;
  if (detail::folds(x)) {
    detail::folded_moments<T>(exec, x, mean, m2);
  } else {
    detail::plain_moments<T>(exec, x, mean, m2);
  }
}

} // namespace syncnorm::host
