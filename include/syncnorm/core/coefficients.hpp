#pragma once

#include <cmath>
#include <cstdint>

#include <syncnorm/config.hpp>

namespace syncnorm {

/// inv_std = 1/√(var + eps) of a batch; 0, and hence y = beta, where all elements are equal and eps is 0.
[[nodiscard]] SYNCNORM_HOST_DEVICE inline double inverse_deviation(double var, double eps) {
  double const square = var + eps;
  return square == 0 ? 0 : 1 / std::sqrt(square);
}

/// One channel of the normalization, y = (x − center)·scale + shift, in the type of the elements' arithmetic.
/// `center` is the mean rounded to `A`, and `shift` makes up for what the rounding lost.
template <class A>
struct normalize_coefficients {
  A center, scale, shift;
};

/// One channel of the input gradient, dx = dy·dy_scale + (x − center)·x_scale + shift.
template <class A>
struct backward_coefficients {
  A dy_scale, center, x_scale, shift;
};

/// Coefficients of y = gamma·(x − mean)·inv_std + beta.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr normalize_coefficients<A>
make_normalize_coefficients(double mean, double inv_std, double gamma, double beta) {
  A const center = static_cast<A>(mean);
  double const scale = inv_std * gamma;
  return {center, static_cast<A>(scale), static_cast<A>(beta - (mean - static_cast<double>(center)) * scale)};
}

/// Coefficients of dx = gamma·inv_std·(dy − sum_dy/n − (x − mean)·inv_std²·sum_dy_xmu/n), where n counts the elements
/// of the channel over all ranks. n = 0 gives the gradient of constant statistics, gamma·inv_std·dy. Source: Ioffe and
/// Szegedy, "Batch normalization", 2015, section 3.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr backward_coefficients<A>
make_backward_coefficients(double mean, double inv_std, double gamma, double sum_dy, double sum_dy_xmu,
                           std::int64_t n) {
  A const center = static_cast<A>(mean);
  double const dy_scale = gamma * inv_std;
  if (n == 0) return {static_cast<A>(dy_scale), center, A{0}, A{0}};
  double const share = dy_scale / static_cast<double>(n);
  double const x_scale =
      -(share * inv_std) * (inv_std * sum_dy_xmu); // in this order, of which no part underflows alone
  double const shift = -share * sum_dy - (mean - static_cast<double>(center)) * x_scale;
  return {static_cast<A>(dy_scale), center, static_cast<A>(x_scale), static_cast<A>(shift)};
}

} // namespace syncnorm
