#pragma once

#include <syncnorm/config.hpp>

namespace syncnorm {

/// A complex number, on the host and on a device.
struct complex_value {
  double re = 0, im = 0;

  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value conjugate() const { return {re, -im}; }
};
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value operator+(complex_value a, complex_value b) {
  return {a.re + b.re, a.im + b.im};
}
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value operator-(complex_value a, complex_value b) {
  return {a.re - b.re, a.im - b.im};
}
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value operator*(double a, complex_value b) {
  return {a * b.re, a * b.im};
}
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr complex_value operator*(complex_value a, complex_value b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

} // namespace syncnorm
