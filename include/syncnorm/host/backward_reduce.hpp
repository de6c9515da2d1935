#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/backward_kernel.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

namespace detail {

template <class T>
void plain_backward_reduce(executor_ref exec, tensor_view<T const> const& dy, tensor_view<T const> const& x,
                           std::span<double const> mean, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  groups const parts{x};
  backward_kernel<T> const kernel{dy, x, mean, parts};
  std::int64_t const chunk = std::min(reduction_chunk(dy), reduction_chunk(x));
  reduce_channels<accumulate_t<T>>(exec, parts, x.channels, chunk, kernel, sum_dy, sum_dy_xmu);
}

template <class T>
void folded_backward_reduce(executor_ref exec, tensor_view<T const> const& dy, tensor_view<T const> const& x,
                            std::span<double const> mean, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  std::int64_t const lanes = x.channels * x.spatial;
  auto const size = static_cast<std::size_t>(lanes);
  scratch_lease<double> scratch{3 * lanes};
  double* const lane_mean = scratch.data();
  double* const lane_dy = lane_mean + size;
  double* const lane_dy_xmu = lane_dy + size;
  for (std::int64_t i = 0; i < lanes; ++i) lane_mean[i] = mean[static_cast<std::size_t>(i / x.spatial)];
  plain_backward_reduce<T>(exec, folded(dy), folded(x), {lane_mean, size}, {lane_dy, size}, {lane_dy_xmu, size});
  for (std::int64_t c = 0; c < x.channels; ++c) {
    auto const sum = [&](double const* of_lanes) {
      return std::accumulate(of_lanes + c * x.spatial, of_lanes + (c + 1) * x.spatial, 0.0);
    };
    sum_dy[static_cast<std::size_t>(c)] = sum(lane_dy);
    sum_dy_xmu[static_cast<std::size_t>(c)] = sum(lane_dy_xmu);
  }
}

} // namespace detail

/// The sums of the backward pass over the N·S elements of each channel:
///
///     sum_dy[c] = Σ dy,  sum_dy_xmu[c] = Σ dy·(x − mean[c])
///
/// Shapes: dy and x `[N, C, S]`, the rest `[C]`. Local. The same bits whatever the executor.
template <class X>
requires element<X>
void backward_reduce(executor_ref exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                     std::span<double const> mean, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  using T = std::remove_const_t<X>;
  if (detail::folds(dy) && detail::folds(x)) {
    detail::folded_backward_reduce<T>(exec, dy, x, mean, sum_dy, sum_dy_xmu);
  } else {
    detail::plain_backward_reduce<T>(exec, dy, x, mean, sum_dy, sum_dy_xmu);
  }
}

} // namespace syncnorm::host
