#pragma once

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/exponential.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

// An activation in the arithmetic of `A`: f(v), dy·f′(v), of which f′(0) is the slope, and v with a residual.

/// f(v) = v where v > 0, else v·slope. A slope of 0 takes all that is negative, infinity, too, and every dy of it to 0.
template <class A>
struct linear_activation {
  using arithmetic = A;
  A slope;

  explicit linear_activation(activation const& of) : slope{static_cast<A>(of.negative_slope)} {}

  template <class V>
  [[nodiscard, gnu::always_inline]] V value(V const& v) const {
    V const zero{};
    if (slope == 0) return v < zero ? zero : v;
    return v < zero ? v * (slope - zero) : v;
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] V gradient(V const& v, V const& dy) const {
    V const zero{};
    if (slope == 0) return v > zero ? dy : zero;
    return v > zero ? dy : dy * (slope - zero);
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] static V add(V const& v, V const& residual) {
    return v + residual;
  }
};

/// f(v) = v where v > 0, else (eᵛ − 1)·slope. Instantiated with a residual alone, which may be anything where there is none.
template <class A>
struct exponential_activation {
  using arithmetic = A;
  A slope;
  bool has_residual;

  exponential_activation(activation const& of, bool with_residual)
      : slope{static_cast<A>(of.negative_slope)}, has_residual{with_residual} {}

  template <class V>
  [[nodiscard, gnu::always_inline]] V value(V const& v) const {
    V const zero{};
    return v < zero ? exponential_minus_1(v) * (slope - zero) : v;
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] V gradient(V const& v, V const& dy) const {
    V const zero{};
    return v > zero ? dy : dy * (exponential(v) * (slope - zero));
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] V add(V const& v, V const& residual) const {
    return has_residual ? v + residual : v;
  }
};

/// dy·f′(v) where positions count; elsewhere, too, if `uncounted` is 1, and 0 there if that is 0.
template <class V, class F, class Lanes>
[[nodiscard, gnu::always_inline]] inline V gradient_of_counted(F const& f, V const& v, V const& dy,
                                                               typename F::arithmetic uncounted, Lanes const& counted) {
  V const zero{}, through = f.gradient(v, dy);
  V const left_out = (uncounted - zero) > zero ? through : zero;
  return where(counted, through, left_out);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
