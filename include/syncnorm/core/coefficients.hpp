#pragma once

#include <cmath>
#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/combination.hpp>

namespace syncnorm {

/// inv_std = 1/√(var + eps) of a batch; 0, and hence y = beta, where all elements are equal and eps is 0.
[[nodiscard]] SYNCNORM_HOST_DEVICE inline double inverse_deviation(double var, double eps) {
  double const square = var + eps;
  return square == 0 ? 0 : 1 / std::sqrt(square);
}

/// inv_std of what `running_var` holds; 0 where that divides by 0.
[[nodiscard]] SYNCNORM_HOST_DEVICE inline double inverse_deviation(double running_var, running_variance kind,
                                                                   double eps) {
  if (kind != running_variance::standard_deviation) return inverse_deviation(running_var, eps);
  return running_var == 0 ? 0 : 1 / running_var;
}

/// Elements of a channel over all ranks, 0 where statistics are constant, and by which variance of theirs they are normalized.
struct normalized_count {
  std::int64_t n = 0;
  batch_variance by = batch_variance::biased;

  SYNCNORM_HOST_DEVICE constexpr normalized_count(std::int64_t count, batch_variance kind = batch_variance::biased)
      : n{count}, by{kind} {}

  /// By what the sum of the squared deviations of more than one element is divided.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t degrees_of_freedom() const {
    return by == batch_variance::unbiased ? n - 1 : n;
  }
};

/// What a running variance divides by, of `n` > 1 elements: that of a standard deviation is the one that normalizes.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t running_degrees_of_freedom(running_variance kind,
                                                                                     normalized_count n) {
  if (kind == running_variance::standard_deviation) return n.degrees_of_freedom();
  return kind == running_variance::unbiased ? n.n - 1 : n.n;
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
/// of the channel over all ranks; by the unbiased variance the latter n is n − 1. n = 0 gives the gradient of constant statistics,
/// gamma·inv_std·dy. Source: Ioffe and Szegedy, "Batch normalization", 2015, section 3.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr backward_coefficients<A>
make_backward_coefficients(double mean, double inv_std, double gamma, double sum_dy, double sum_dy_xmu,
                           normalized_count n) {
  A const center = static_cast<A>(mean);
  double const dy_scale = gamma * inv_std;
  if (n.n == 0) return {static_cast<A>(dy_scale), center, A{0}, A{0}};
  double const share = dy_scale / static_cast<double>(n.n);
  double const x_scale = -(dy_scale / static_cast<double>(n.degrees_of_freedom()) * inv_std) *
                         (inv_std * sum_dy_xmu); // in this order, of which no part underflows alone
  double const shift = -share * sum_dy - (mean - static_cast<double>(center)) * x_scale;
  return {static_cast<A>(dy_scale), center, static_cast<A>(x_scale), static_cast<A>(shift)};
}

/// given·other. What is not given is 0 and stays so, whatever it meets.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr A times_given(A given, A other) {
  return given == 0 ? A{0} : given * other;
}

/// Sums of one channel in a double backward pass, with x̂ = (x − mean)·inv_std, and g, u and a as in
/// `batch_norm_double_backward`; what is not given is 0 in all.
struct second_order_sums {
  double g, g_xhat, u, u_xhat, u_g, a_g, a_g_xhat;
};

/// The gradients that dy and x get: `a` of a combination is u, and `b` of it v for dy and g for x.
struct second_order_coefficients {
  combination for_dy, for_x;
};

/// `a`, `b`: the gradients with respect to those of gamma and beta; `s`: over all ranks, of `n` elements; none: constant statistics,
/// which have no gradient.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr second_order_coefficients
make_second_order_coefficients(double mean, double inv_std, double gamma, double a, double b,
                               second_order_sums const& s, normalized_count n) {
  double const scale = gamma * inv_std;
  if (n.n <= 0) return {{scale, 1, mean, inv_std * a, b}, {0, a * inv_std, mean, 0, 0}};
  double const share = 1 / static_cast<double>(n.n);
  double const of_variance = 1 / static_cast<double>(n.degrees_of_freedom());
  double const rn = inv_std * of_variance;
  double const spread = s.u_g - (times_given(s.u, s.g) * share + 3 * times_given(s.u_xhat, s.g_xhat) * of_variance);
  return {{scale, 1, mean, inv_std * (a - scale * s.u_xhat * of_variance), b - scale * s.u * share},
          {-scale * rn * s.g_xhat, a * inv_std - scale * rn * s.u_xhat, mean,
           -inv_std * rn * (s.a_g_xhat + scale * spread),
           scale * rn * share * (times_given(s.u, s.g_xhat) + times_given(s.u_xhat, s.g)) - inv_std * share * s.a_g}};
}

/// What gamma gets of a double backward pass, by this rank's own sums and those `s` of all.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr double second_order_gamma(double inv_std, double own_u, double own_u_xhat,
                                                                       double own_u_g, second_order_sums const& s,
                                                                       normalized_count n) {
  if (n.n <= 0) return inv_std * own_u_g;
  return inv_std * (own_u_g - times_given(own_u, s.g) / static_cast<double>(n.n) -
                    times_given(own_u_xhat, s.g_xhat) / static_cast<double>(n.degrees_of_freedom()));
}

} // namespace syncnorm
