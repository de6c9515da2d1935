#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/power_backward_kernel.hpp>
#include <syncnorm/host/detail/power_kernel.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/second_moments.hpp>

namespace syncnorm::host {

namespace detail {

/// Runs the backward kernel over all of dy and x.
template <bool Sums, bool Map, class T>
void power_backward_pass(executor_ref exec, tensor_view<T const> const& dy, tensor_view<T const> const& x,
                         tensor_view<T> const& dx, mask_view const& mask, channel_scaling const& scaling,
                         accumulate_t<T> const* dy_scale, accumulate_t<T> const* u_scale, std::span<double> sum_dy,
                         std::span<double> sum_dy_u) {
  if (Map ? are_position_major(dy, x, dx) : are_position_major(dy, x))
    return power_backward_pass<Sums, Map>(exec, transposed(dy), transposed(x), transposed(dx), transposed(mask),
                                          scaling, dy_scale, u_scale, sum_dy, sum_dy_u);
  auto const run = [&](auto scaled) {
    power_backward_kernel<T, scaled.value, Sums, Map> const kernel{
        dy, x, dx, mask, groups_of(scaling, x.channels), dy_scale, u_scale};
    run_power<Sums>(exec, kernel.parts(), x.channels, kernel.chunk(), kernel, sum_dy, sum_dy_u);
  };
  scaling.groups == 0 ? run(std::false_type{}) : run(std::true_type{});
}

} // namespace detail

/// The sums of the backward pass of power norm, in one reading of dy and x with its gradient:
///
///     sum_dy = Σ dy,  sum_dy_u = Σ dy·u,  du = dy·dy_scale + u·u_scale
///
/// where dx is du without scaling, and what `group_scaling_backward` makes of du with it. Masked positions do not enter the
/// sums, and their dx is 0. A default dx: not needed.
///
/// Shapes: dy, x and dx `[N, C, S]`, mask `[N, S]`, the rest `[C]`. Local. dx may be dy or x. The same bits whatever the
/// executor.
template <class T>
requires element<T>
void power_backward(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                    std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dx, mask_view const& mask,
                    channel_scaling const& scaling, std::span<double const> dy_scale, std::span<double const> u_scale,
                    std::span<double> sum_dy, std::span<double> sum_dy_u) {
  using A = accumulate_t<T>;
  if (dx.data == nullptr)
    return detail::power_backward_pass<true, false, T>(exec, dy, x, dx, mask, scaling, nullptr, nullptr, sum_dy,
                                                       sum_dy_u);
  detail::scratch_lease<A> table{2 * x.channels};
  A* const factors = table.data();
  auto const channels = static_cast<std::size_t>(x.channels);
  for (std::size_t c = 0; c < channels; ++c) {
    factors[c] = static_cast<A>(dy_scale[c]);
    factors[channels + c] = static_cast<A>(u_scale[c]);
  }
  detail::power_backward_pass<true, true, T>(exec, dy, x, dx, mask, scaling, factors, factors + channels, sum_dy,
                                             sum_dy_u);
}

} // namespace syncnorm::host
