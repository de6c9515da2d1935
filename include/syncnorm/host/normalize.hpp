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
struct normalize_terms {
  static constexpr std::size_t coefficients = 3;

  std::span<double const> mean, inv_std;
  channel_values gamma, beta;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    auto const k = make_normalize_coefficients<A>(mean[c], inv_std[c], gamma[c], beta[c]);
    return {k.scale, k.center, k.shift};
  }
};

} // namespace detail

/// y = gamma·(x − mean)·inv_std + beta. An empty gamma stands for 1, an empty beta for 0.
///
/// Shapes: x and y `[N, C, S]`, the rest `[C]`. Local. y may be x. `how` says how y is written; a caller that works block
/// by block asks `stores_for` with the whole of y, and names by `fetch` the block that it goes on with.
template <class T>
requires element<T>
void normalize(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
               std::span<double const> mean, std::span<double const> inv_std, affine_values const& params,
               stores how = stores::automatic, next_block fetch = {}) {
  detail::normalize_terms<accumulate_t<T>> const terms{mean, inv_std, params.gamma, params.beta};
  detail::map_elements<T>(exec, detail::linear_op<1>{}, terms, {x}, {y}, nullptr, how, fetch);
}

} // namespace syncnorm::host
