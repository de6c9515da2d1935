#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/combine.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

namespace detail {

/// (Σ inⱼ·scaleⱼ + (x − center)·scale_x + shift)·f′(v) of `Terms` tensors, x and, if there is one, the residual; 0 where positions do
/// not count. Where scale_x is 0, x may be anything.
template <class A, std::size_t Terms, bool Residual>
struct gated_combination_op {
  static constexpr std::size_t inputs = Terms + (Residual ? 2 : 1), outputs = 1, coefficients = Terms + 5;
  static constexpr bool takes_mask = true;

  A slope;

  template <class V, class Lanes>
  [[gnu::always_inline]] std::array<V, outputs>
  apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k, Lanes const& counted) const {
    V const zero{}, d = in[Terms] - k[Terms];
    V v = multiply_add(d, k[Terms + 3], k[Terms + 4]);
    if constexpr (Residual) v += in[Terms + 1];
    V const scale_x = k[Terms + 1], shift = k[Terms + 2];
    V sum = scale_x == zero ? shift : multiply_add(d, scale_x, shift);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < Terms; ++j) sum = multiply_add(in[j], k[j], sum);
    return {where(counted, activation_gradient(v, sum, slope), zero)};
  }
};

/// Its coefficients.
template <class A, std::size_t Terms>
struct gated_combination_terms {
  static constexpr std::size_t coefficients = Terms + 5;

  std::span<combination const> channels;
  std::array<double combination::*, Terms> scales;
  std::span<double const> mean, inv_std;
  affine_values affine;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    auto const& k = channels[c];
    auto const v = make_normalize_coefficients<A>(mean[c], inv_std[c], affine.gamma[c], affine.beta[c]);
    std::array<A, coefficients> values;
    for (std::size_t j = 0; j < Terms; ++j) values[j] = static_cast<A>(k.*scales[j]);
    values[Terms] = v.center;
    values[Terms + 1] = static_cast<A>(k.scale_x);
    // The shift makes up for what rounding the mean loses.
    values[Terms + 2] = static_cast<A>(k.shift - (k.mean - static_cast<double>(v.center)) * k.scale_x);
    values[Terms + 3] = v.scale;
    values[Terms + 4] = v.shift;
    return values;
  }
};

} // namespace detail

/// out = w·f′(gamma·(x − mean)·inv_std + beta + residual)·(a·scale_a + b·scale_b + (x − mean)·scale_x + shift), by the `combination` of
/// each channel; w is 0 where the output is 0 by the mask, else 1. A default view is no term, nor is a tensor whose scale is 0 in
/// every channel.
///
/// Shapes: a, b, x, out and the residual `[N, C, S]`, the rest `[C]`. Local. out may be any of the inputs. `how`: see `normalize`.
template <class T>
requires element<T>
void combine_gated(executor_ref exec, std::type_identity_t<tensor_view<T const>> a,
                   std::type_identity_t<tensor_view<T const>> b, std::type_identity_t<tensor_view<T const>> x,
                   tensor_view<T> out, std::span<combination const> channels, std::span<double const> mean,
                   std::span<double const> inv_std, affine_values const& params, prepared_epilogue<T> const& epilogue,
                   stores how = stores::automatic) {
  using A = accumulate_t<T>;
  detail::combined_tensors<T, 2> in;
  in.add(channels, a, &combination::scale_a);
  in.add(channels, b, &combination::scale_b);
  auto const run = [&]<std::size_t Terms, bool Residual>(std::integral_constant<std::size_t, Terms>,
                                                         std::bool_constant<Residual>) {
    using op = detail::gated_combination_op<A, Terms, Residual>;
    detail::gated_combination_terms<A, Terms> terms_of{channels, {}, mean, inv_std, params};
    std::array<tensor_view<T const>, op::inputs> used;
    std::copy_n(in.tensors.begin(), Terms, used.begin());
    std::copy_n(in.scales.begin(), Terms, terms_of.scales.begin());
    used[Terms] = x;
    if constexpr (Residual) used[Terms + 1] = epilogue.residual();
    detail::map_elements<T>(exec, op{epilogue.slope()}, terms_of, used, {out}, epilogue.written(), how);
  };
  in.with_count(
      [&](auto terms) { epilogue.has_residual() ? run(terms, std::true_type{}) : run(terms, std::false_type{}); });
}

} // namespace syncnorm::host
