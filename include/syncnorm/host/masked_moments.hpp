#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/masked_moments_kernel.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/local_moments.hpp>

namespace syncnorm::host {

namespace detail {

template <class T>
void masked_moments(executor_ref exec, tensor_view<T const> const& x, prepared_mask const& mask, std::span<double> mean,
                    std::span<double> m2) {
  if (mask.count() == x.count()) {
    local_moments(exec, x, mean, m2);
    return;
  }
  masked_groups const parts{mask};
  masked_moments_kernel<T> const kernel{x, parts};
  reduce_channels<accumulate_t<T>>(exec, parts, x.channels, reduction_chunk(x), kernel, {mean.data(), m2.data()});
}

} // namespace detail

/// Moments of each channel over the positions that count, by a default mask all: mean[c] and m2[c] = Σ (x − mean[c])². Zeros where
/// none does.
/// Elements that do not count have no influence, even where they are no numbers. Returns how many positions count.
///
/// Shapes: x `[N, C, S]`, mask `[N, S]`, mean and m2 `[C]`. Local. The same bits whatever the executor, and those of
/// `local_moments` where all positions count.
template <class X>
requires element<X> std::int64_t local_moments(executor_ref exec, tensor_view<X> x, mask_view const& mask,
                                               std::span<double> mean, std::span<double> m2) {
  if (!mask) {
    local_moments(exec, x, mean, m2);
    return x.count();
  }
  detail::prepared_mask const prepared{mask, detail::row_cut::longest<X>};
  detail::masked_moments<std::remove_const_t<X>>(exec, x, prepared, mean, m2);
  return prepared.count();
}

} // namespace syncnorm::host
