#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/combination.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// The coefficients of `second_order_op`.
template <class A>
struct second_order_op_terms {
  static constexpr std::size_t coefficients = 11;

  activated_channels of;
  std::span<combination const> for_dy, for_x;

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
            static_cast<A>(dy.scale_a),
            static_cast<A>(dy.scale_b),
            static_cast<A>(dy.scale_x),
            shift(dy),
            static_cast<A>(x.scale_a),
            static_cast<A>(x.scale_b),
            static_cast<A>(x.scale_x),
            shift(x)};
  }
};

/// Outputs to_dy = f′(v)·(u·scale_a + v′·scale_b + (x − mean)·scale_x + shift) and
/// to_x = g·scale_b + u·scale_a + (x − mean)·scale_x + shift, where g = dy·f′(v); where positions do not count, the latter is its first
/// term alone. Inputs are dy, x, and of u, v′ and the residual those that there are. What a scale of 0 meets may be anything.
template <class A, bool U, bool V, bool Residual>
struct second_order_op {
  static constexpr std::size_t of_u = 2, of_v = of_u + (U ? 1 : 0), of_residual = of_v + (V ? 1 : 0),
                               inputs = of_residual + (Residual ? 1 : 0), outputs = 2,
                               coefficients = second_order_op_terms<A>::coefficients;
  static constexpr bool takes_mask = true;

  A slope;
  A uncounted; ///< 1: outputs that do not count have a gradient; 0: they are 0, and so is theirs

  template <class Vec, class Lanes>
  [[gnu::always_inline]] std::array<Vec, outputs>
  apply(std::array<Vec, inputs> const& in, std::array<Vec, coefficients> const& k, Lanes const& counted) const {
    Vec const zero{}, d = in[1] - k[0];
    Vec v = multiply_add(d, k[1], k[2]);
    if constexpr (Residual) v += in[of_residual];
    auto const back = [&](Vec const& gradient) {
      Vec const through = activation_gradient(v, gradient, slope);
      Vec const left_out = (uncounted - zero) > zero ? through : zero;
      return where(counted, through, left_out);
    };
    auto const add = [&](Vec const& to, Vec const& tensor, Vec const& scale) {
      return scale == zero ? to : multiply_add(tensor, scale, to);
    };
    Vec to_dy = add(k[6], d, k[5]), to_x = add(k[10], d, k[9]);
    if constexpr (U) {
      to_dy = add(to_dy, in[of_u], k[3]);
      to_x = add(to_x, in[of_u], k[7]);
    }
    if constexpr (V) to_dy = add(to_dy, in[of_v], k[4]);
    return {back(to_dy), add(where(counted, to_x, zero), back(in[0]), k[8])};
  }
};

} // namespace syncnorm::host::detail
