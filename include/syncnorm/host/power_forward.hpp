#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/second_moments.hpp>

namespace syncnorm::host {

namespace detail {

/// Scale and shift of y = gamma·u·inv_root + beta, one after the other.
template <class A>
void fill_power_table(A* table, std::span<double const> inv_root, affine_values const& affine) {
  std::size_t const channels = inv_root.size();
  for (std::size_t c = 0; c < channels; ++c) {
    table[c] = static_cast<A>(affine.gamma[c] * inv_root[c]);
    table[channels + c] = static_cast<A>(affine.beta[c]);
  }
}

} // namespace detail

/// y = gamma·u·inv_root + beta. An empty gamma stands for 1, an empty beta for 0.
///
/// Shapes: x and y `[N, C, S]`, the rest `[C]`. Local. y may be x.
template <class T>
requires element<T>
void power_normalize(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                     channel_scaling const& scaling, std::span<double const> inv_root, affine_values const& affine) {
  using A = accumulate_t<T>;
  detail::scratch_lease<A> table{2 * x.channels};
  detail::fill_power_table(table.data(), inv_root, affine);
  detail::power_forward_pass<false, true, T>(exec, x, y, {}, scaling, table.data(), table.data() + x.channels, {}, {});
}

/// `second_moments` and `power_normalize` by an inv_root that does not depend on them, in one reading of x.
template <class T>
requires element<T>
void power_forward(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                   mask_view const& mask, channel_scaling const& scaling, std::span<double const> inv_root,
                   affine_values const& affine, std::span<double> counted, std::span<double> masked) {
  using A = accumulate_t<T>;
  detail::scratch_lease<A> table{2 * x.channels};
  detail::fill_power_table(table.data(), inv_root, affine);
  detail::power_forward_pass<true, true, T>(exec, x, y, mask, scaling, table.data(), table.data() + x.channels, counted,
                                            masked);
}

} // namespace syncnorm::host
