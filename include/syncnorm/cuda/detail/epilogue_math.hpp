#pragma once

#include <syncnorm/config.hpp>

namespace syncnorm::cuda::detail {

/// f(v) of an activation of negative slope `slope`. 0 takes all that is negative to 0, infinity, too.
template <class A>
[[nodiscard]] SYNCNORM_DEVICE inline A activate(A v, A slope) {
  return v < A{0} ? (slope != A{0} ? v * slope : A{0}) : v;
}

/// dy·f′(v), where f′(0) is the slope. 0 takes every dy to 0, as it does v.
template <class A>
[[nodiscard]] SYNCNORM_DEVICE inline A activation_gradient(A v, A dy, A slope) {
  return v > A{0} ? dy : (slope != A{0} ? dy * slope : A{0});
}

} // namespace syncnorm::cuda::detail
