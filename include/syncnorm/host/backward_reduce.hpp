#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/backward_kernel.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// The sums of the backward pass over the N·S elements of each channel:
///
///     sum_dy[c] = Σ dy,  sum_dy_xmu[c] = Σ dy·(x − mean[c])
///
/// Shapes: dy and x `[N, C, S]`, the rest `[C]`. Local. The same bits whatever the executor.
template <class X, executor E>
requires element<X>
void backward_reduce(E const& exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                     std::span<double const> mean, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  using T = std::remove_const_t<X>;
  detail::groups const parts{x.samples, x.spatial};
  detail::backward_kernel<T> const kernel{dy, x, mean, parts};
  std::int64_t const chunk = std::min(detail::reduction_chunk(dy), detail::reduction_chunk(x));
  detail::reduce_channels<accumulate_t<T>>(exec, parts, x.channels, chunk, kernel, sum_dy, sum_dy_xmu);
}

} // namespace syncnorm::host
