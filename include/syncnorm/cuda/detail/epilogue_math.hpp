#pragma once

#include <cmath>
#include <cstdint>

#include <syncnorm/config.hpp>

namespace syncnorm::cuda::detail {

/// What kernels are compiled for: no epilogue, or one with an activation that is exponential or not.
enum class epilogue_kind : std::uint8_t { none, linear, exponential };

/// f(v) of an activation of negative slope `slope`. One that is linear takes all that is negative to 0 by 0, infinity, too.
template <epilogue_kind Kind, class A>
[[nodiscard]] SYNCNORM_DEVICE inline A activate(A v, A slope) {
  if constexpr (Kind == epilogue_kind::exponential)
    return v < A{0} ? std::expm1(v) * slope : v;
  else
    return v < A{0} ? (slope != A{0} ? v * slope : A{0}) : v;
}

/// dy·f′(v), where f′(0) is the slope. One that is linear takes every dy to 0 by 0, as it does v.
template <epilogue_kind Kind, class A>
[[nodiscard]] SYNCNORM_DEVICE inline A activation_gradient(A v, A dy, A slope) {
  if constexpr (Kind == epilogue_kind::exponential)
    return v > A{0} ? dy : dy * (std::exp(v) * slope);
  else
    return v > A{0} ? dy : (slope != A{0} ? dy * slope : A{0});
}

} // namespace syncnorm::cuda::detail
