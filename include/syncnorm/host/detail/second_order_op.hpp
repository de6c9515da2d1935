#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/combination.hpp>
#include <syncnorm/host/detail/activation.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// The coefficients of `second_order_op`.
template <class A>
struct second_order_op_terms {
  static constexpr std::size_t coefficients = 11;

  activated_channels of;
  std::span<combination const> for_dy, for_x;
  bool has_u, has_v; ///< else their scales are 0

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const &dy = for_dy[static_cast<std::size_t>(channel)], &x = for_x[static_cast<std::size_t>(channel)];
    auto const v = of.coefficients<A>(channel);
    // The shifts make up for what rounding the mean loses.
    auto const shift = [&](combination const& k) {
      return static_cast<A>(k.shift - (k.mean - static_cast<double>(v.center)) * k.scale_x);
    };
    return {v.center,
            v.scale,
            v.shift,
            static_cast<A>(has_u ? dy.scale_a : 0),
            static_cast<A>(has_v ? dy.scale_b : 0),
            static_cast<A>(dy.scale_x),
            shift(dy),
            static_cast<A>(has_u ? x.scale_a : 0),
            static_cast<A>(x.scale_b),
            static_cast<A>(x.scale_x),
            shift(x)};
  }
};

/// Outputs to_dy = f′(v)·(u·scale_a + v′·scale_b + (x − mean)·scale_x + shift) and
/// to_x = g·scale_b + u·scale_a + (x − mean)·scale_x + shift, where g = dy·f′(v); where positions do not count, the latter is its first
/// term alone. Inputs are dy, x, u, v′ and the residual. What a scale of 0 meets may be anything, and so may a residual that there is
/// not.
template <class A>
struct second_order_op {
  static constexpr std::size_t inputs = 5, outputs = 2, coefficients = second_order_op_terms<A>::coefficients;
  static constexpr bool takes_mask = true;

  linear_activation<A> f;
  bool has_residual;
  A uncounted; ///< 1: outputs that do not count have a gradient; 0: they are 0, and so is theirs

  template <class V, class Lanes>
  [[gnu::always_inline]] std::array<V, outputs>
  apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k, Lanes const& counted) const {
    V const zero{}, d = in[1] - k[0];
    V v = multiply_add(d, k[1], k[2]);
    if (has_residual) v += in[4];
    auto const back = [&](V const& gradient) { return gradient_of_counted(f, v, gradient, uncounted, counted); };
    auto const add = [&](V const& to, V const& tensor, V const& scale) {
      return scale == zero ? to : multiply_add(tensor, scale, to);
    };
    V const to_dy = add(add(add(k[6], d, k[5]), in[2], k[3]), in[3], k[4]);
    V const to_x = add(add(k[10], d, k[9]), in[2], k[7]);
    return {back(to_dy), add(where(counted, to_x, zero), back(in[0]), k[8])};
  }
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
