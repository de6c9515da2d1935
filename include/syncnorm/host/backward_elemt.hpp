#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/linear_op.hpp>
#include <syncnorm/host/detail/map_elements.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

namespace detail {

template <class A>
struct backward_elemt_terms {
  static constexpr std::size_t coefficients = 4;

  std::span<double const> mean, inv_std;
  channel_values gamma;
  std::span<double const> sum_dy, sum_dy_xmu;
  normalized_count count;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    auto const k = make_backward_coefficients<A>(mean[c], inv_std[c], gamma[c], sum_dy[c], sum_dy_xmu[c], count);
    return {k.dy_scale, k.x_scale, k.center, k.shift};
  }
};

/// The same of constant statistics, by which dx is a multiple of dy alone.
template <class A>
struct constant_gradient_terms {
  static constexpr std::size_t coefficients = 3;

  std::span<double const> inv_std;
  channel_values gamma;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    return {make_backward_coefficients<A>(0, inv_std[c], gamma[c], 0, 0, 0).dy_scale, 0, 0};
  }
};

} // namespace detail

/// The gradient of the input,
///
///     dx = gamma·inv_std·(dy − sum_dy/count − (x − mean)·inv_std²·sum_dy_xmu/count)
///
/// where sums and count are those over all ranks; by the unbiased variance the latter is count − 1. count = 0 stands for constant
/// statistics, as in eval mode: dx = gamma·inv_std·dy, whatever x is, and the sums may be empty. An empty gamma stands for 1.
///
/// Shapes: dy, x and dx `[N, C, S]`, the rest `[C]`. Local. dx may be dy or x. `how` and `fetch`: see `normalize`.
template <class T>
requires element<T>
void backward_elemt(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                    std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dx, std::span<double const> mean,
                    std::span<double const> inv_std, channel_values const& gamma, std::span<double const> sum_dy,
                    std::span<double const> sum_dy_xmu, normalized_count count, stores how = stores::automatic,
                    next_block fetch = {}) {
  if (count.n == 0) {
    detail::constant_gradient_terms<accumulate_t<T>> const terms{inv_std, gamma};
    return detail::map_elements<T>(exec, detail::linear_op<1>{}, terms, {dy}, {dx}, nullptr, how, fetch);
  }
  detail::backward_elemt_terms<accumulate_t<T>> const terms{mean, inv_std, gamma, sum_dy, sum_dy_xmu, count};
  detail::map_elements<T>(exec, detail::linear_op<2>{}, terms, {dy, x}, {dx}, nullptr, how, fetch);
}

} // namespace syncnorm::host
