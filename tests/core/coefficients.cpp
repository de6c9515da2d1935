#include <cmath>
#include <initializer_list>

#include <doctest/doctest.h>
#include <syncnorm/core/coefficients.hpp>

using namespace syncnorm;

TEST_CASE_TEMPLATE("normalize coefficients are gamma (x - mean) inv_std + beta", A, float, double) {
  double const mean = 0.1, inv_std = 1.7, gamma = -2.3, beta = 0.4;
  auto const k = make_normalize_coefficients<A>(mean, inv_std, gamma, beta);
  for (double const x : {-3.0, 0.0, 0.25, 7.0}) {
    auto const y = static_cast<double>((static_cast<A>(x) - k.center) * k.scale + k.shift);
    CHECK(y == doctest::Approx(gamma * (x - mean) * inv_std + beta).epsilon(sizeof(A) == 4 ? 1e-6 : 1e-14));
  }
}

TEST_CASE("what the mean loses in float is in the shift") {
  double const mean = 10000.0003, inv_std = 100;
  auto const k = make_normalize_coefficients<float>(mean, inv_std, 1, 0);
  CHECK(static_cast<double>(k.center) != mean);
  auto const y = static_cast<double>((10000.0f - k.center) * k.scale + k.shift);
  CHECK(y == doctest::Approx((10000.0 - mean) * inv_std).epsilon(1e-5));
}

TEST_CASE_TEMPLATE("backward coefficients are the gradient of the input", A, float, double) {
  double const mean = 0.3, inv_std = 1.7, gamma = -2.3, sum_dy = 5.5, sum_dy_xmu = -8.25;
  std::int64_t const n = 12;
  auto const k = make_backward_coefficients<A>(mean, inv_std, gamma, sum_dy, sum_dy_xmu, n);
  for (double const x : {-3.0, 0.25, 7.0})
    for (double const dy : {-1.0, 0.5}) {
      auto const got =
          static_cast<double>(static_cast<A>(dy) * k.dy_scale + ((static_cast<A>(x) - k.center) * k.x_scale + k.shift));
      double const expected = gamma * inv_std * (dy - sum_dy / 12 - (x - mean) * inv_std * inv_std * sum_dy_xmu / 12);
      CHECK(got == doctest::Approx(expected).epsilon(sizeof(A) == 4 ? 1e-6 : 1e-14));
    }
}

TEST_CASE("by the unbiased variance, what comes through it divides by one less") {
  auto const biased = make_backward_coefficients<double>(0, 2, 3, 5, 7, 4);
  auto const unbiased = make_backward_coefficients<double>(0, 2, 3, 5, 7, {4, syncnorm::batch_variance::unbiased});
  CHECK(unbiased.dy_scale == biased.dy_scale);
  CHECK(unbiased.shift == biased.shift);
  CHECK(unbiased.x_scale == -3 * 2 * 2 * 2 * 7 / 3.0);
  CHECK(biased.x_scale == -3 * 2 * 2 * 2 * 7 / 4.0);
}

TEST_CASE("backward coefficients of numbers far from 1 lose nothing") {
  for (double const scale : {1e150, 1e-100}) {
    auto const k = syncnorm::make_backward_coefficients<double>(0, 1 / scale, 1, 0, 3 * scale, 6);
    CHECK(k.x_scale * scale == doctest::Approx(-0.5 / scale).epsilon(1e-14));
  }
}

TEST_CASE("the gradient of constant statistics needs no sums") {
  auto const k = make_backward_coefficients<double>(0.3, 1.5, 2, NAN, NAN, 0);
  CHECK(k.dy_scale == 3);
  CHECK(k.x_scale == 0);
  CHECK(k.shift == 0);
}
