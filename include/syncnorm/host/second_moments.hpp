#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/power_forward_kernel.hpp>
#include <syncnorm/host/detail/power_kernel.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// Which groups of channels are scaled to a mean square of 1 before anything else is done with them; see
/// `group_scaling`. `groups` divides the number of channels; 0: none are, u = x.
struct channel_scaling {
  std::int64_t groups = 0;
  double eps = 1e-5;
};

namespace detail {

[[nodiscard]] inline channel_groups groups_of(channel_scaling const& scaling, std::int64_t channels) {
  return {scaling.groups == 0 ? 0 : channels / scaling.groups, scaling.eps};
}

/// Runs the forward kernel over all of x.
template <bool Sums, bool Map, class T>
void power_forward_pass(executor_ref exec, tensor_view<T const> const& x, tensor_view<T> const& y,
                        mask_view const& mask, channel_scaling const& scaling, accumulate_t<T> const* scale,
                        accumulate_t<T> const* shift, std::span<double> counted, std::span<double> masked) {
  if (Map ? are_position_major(x, y) : are_position_major(x))
    return power_forward_pass<Sums, Map>(exec, transposed(x), transposed(y), transposed(mask), scaling, scale, shift,
                                         counted, masked);
  auto const run = [&](auto scaled) {
    power_forward_kernel<T, scaled.value, Sums, Map> const kernel{x,     y,    mask, groups_of(scaling, x.channels),
                                                                  scale, shift};
    run_power<Sums>(exec, kernel.parts(), x.channels, kernel.chunk(), kernel, counted, masked);
  };
  scaling.groups == 0 ? run(std::false_type{}) : run(std::true_type{});
}

} // namespace detail

/// Σ u² of each channel, in `counted` over the positions that count, in `masked` over the others.
///
/// Shapes: x `[N, C, S]`, mask `[N, S]`, counted and masked `[C]`. Local. The same bits whatever the executor.
template <class X>
requires element<std::remove_const_t<X>>
void second_moments(executor_ref exec, tensor_view<X> x, mask_view const& mask, channel_scaling const& scaling,
                    std::span<double> counted, std::span<double> masked) {
  using T = std::remove_const_t<X>;
  detail::power_forward_pass<true, false, T>(exec, x, tensor_view<T>{}, mask, scaling, nullptr, nullptr, counted,
                                             masked);
}

/// How many positions of `[N, S]` count.
[[nodiscard]] inline std::int64_t count_positions(std::int64_t samples, std::int64_t spatial, mask_view const& mask) {
  if (mask.data == nullptr || spatial == 0) return samples * spatial;
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < samples; ++n)
    for (std::int64_t s = 0; s < spatial; ++s) count += mask(n, s) ? 1 : 0;
  return count;
}

} // namespace syncnorm::host
