#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/moments_kernel.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// Moments of each channel: mean[c] and m2[c] = Σ (x − mean[c])² over its N·S elements, which `x.count()` counts.
/// Zeros where that is 0.
///
/// Shapes: x `[N, C, S]`, mean and m2 `[C]`. Local. The same bits whatever the executor.
template <class X, executor E>
requires element<X>
void local_moments(E const& exec, tensor_view<X> x, std::span<double> mean, std::span<double> m2) {
  using T = std::remove_const_t<X>;
  detail::groups const parts{x.samples, x.spatial};
  detail::moments_kernel<T> const kernel{x, parts};
  detail::reduce_channels<accumulate_t<T>>(exec, parts, x.channels, detail::reduction_chunk(x), kernel, mean, m2);
}

} // namespace syncnorm::host
