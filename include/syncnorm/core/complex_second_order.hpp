#pragma once

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex_value.hpp>

namespace syncnorm {

/// given·other by parts. A part that is not given is 0 and stays so, whatever it meets.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value times_given(complex_value given, complex_value other) {
  return {times_given(given.re, other.re) - times_given(given.im, other.im),
          times_given(given.re, other.im) + times_given(given.im, other.re)};
}

/// Sums of one complex channel in a double backward pass, of all outputs that have a gradient, or of the positions that count, with
/// x̂ = (x − mean)·inv_std: Σ dy, Σ dy·conj(x̂), Σ u, Re Σ u·conj(x̂), Σ dy·conj(u), and over the ranks Σ conj(a)·dy and
/// Re Σ conj(a)·dy·conj(x̂). By a real gamma, real parts alone of all products.
struct complex_second_order_sums {
  complex_value dy, dy_xhat, u;
  double u_xhat = 0;
  complex_value dy_u, a_dy;
  double a_dy_xhat = 0;
};

/// The gradients that dy and x get: u·u_scale + (x − mean)·x_scale + shift, and to_x besides dy·dy_scale.
struct complex_second_order_coefficients {
  struct {
    complex_value u_scale, x_scale, shift;
  } for_dy;
  struct {
    complex_value dy_scale, shift;
    double u_scale = 0, x_scale = 0;
  } for_x;
};

/// `a`, `b`: the gradients with respect to those of gamma and beta; `s`: over all ranks, of `n` elements; none: constant statistics,
/// which have no gradient. As `make_second_order_coefficients`, by the gradient g = conj(gamma)·dy of x̂.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_second_order_coefficients
make_complex_second_order_coefficients(double inv_std, complex_value gamma, complex_value a, complex_value b,
                                       complex_second_order_sums const& s, normalized_count n) {
  auto const scale = inv_std * gamma;
  if (n.n <= 0) return {{scale, inv_std * a, b}, {inv_std * a.conjugate(), {}, 0, 0}};
  double const share = 1 / static_cast<double>(n.n);
  double const of_variance = 1 / static_cast<double>(n.degrees_of_freedom());
  double const rn = inv_std * of_variance;
  auto const turned = gamma.conjugate();
  auto const g = times_given(turned, s.dy);
  double const g_xhat = times_given(turned, s.dy_xhat).re;
  double const spread = (turned * s.dy_u).re - (times_given(s.u.re, g.re) + times_given(s.u.im, g.im)) * share -
                        3 * times_given(s.u_xhat, g_xhat) * of_variance;
  auto const products = complex_value{times_given(s.u.re, g_xhat), times_given(s.u.im, g_xhat)} +
                        complex_value{times_given(s.u_xhat, g.re), times_given(s.u_xhat, g.im)};
  return {{scale, inv_std * (a - (s.u_xhat * of_variance) * scale), b - share * (scale * s.u)},
          {inv_std * a.conjugate() - (rn * inv_std * s.u_xhat) * turned,
           (inv_std * rn * share) * products - (inv_std * share) * s.a_dy, -inv_std * rn * g_xhat,
           -inv_std * rn * (s.a_dy_xhat + inv_std * spread)}};
}

/// What gamma gets of a double backward pass, by this rank's `own` sums of u and those `s` of all; of a real gamma, the real part.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value
complex_second_order_gamma(double inv_std, complex_value own_u, double own_u_xhat, complex_value own_dy_u,
                           complex_second_order_sums const& s, normalized_count n) {
  if (n.n <= 0) return inv_std * own_dy_u;
  double const share = 1 / static_cast<double>(n.n), of_variance = 1 / static_cast<double>(n.degrees_of_freedom());
  return inv_std * (own_dy_u - share * times_given(own_u.conjugate(), s.dy) -
                    of_variance * times_given({own_u_xhat, 0}, s.dy_xhat));
}

} // namespace syncnorm
