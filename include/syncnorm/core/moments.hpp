#pragma once

#include <cstdint>
#include <limits>

#include <syncnorm/config.hpp>

namespace syncnorm {

/// Count, mean and centred second moment `m2 = Σ (x − mean)²` of a set of values. A monoid under `merge`, with the
/// zero count as its neutral element. `A` is a floating-point type.
template <class A>
struct moments {
  std::int64_t count = 0;
  A mean = 0;
  A m2 = 0;

  /// Biased variance m2 / count; 0 when empty.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr A variance() const {
    return count > 0 ? m2 / static_cast<A>(count) : A{0};
  }
  /// Unbiased variance m2 / (count − 1); the count must be at least 2.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr A unbiased_variance() const { return m2 / static_cast<A>(count - 1); }
};

/// Moments of the union of two disjoint sets:
///
///     δ = b.mean − a.mean,  n = a.count + b.count
///     mean = a.mean + δ·b.count/n,  m2 = a.m2 + b.m2 + δ²·a.count·b.count/n
///
/// Associative and commutative up to rounding. Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise
/// algorithm for computing sample variances", 1979.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr moments<A> merge(moments<A> const& a, moments<A> const& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  auto const count = a.count + b.count;
  A const delta = b.mean - a.mean;
  A const share = static_cast<A>(b.count) / static_cast<A>(count);
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * (static_cast<A>(a.count) * share)};
}

namespace detail {

template <class A>
inline constexpr A epsilon = std::numeric_limits<A>::epsilon(); // which kernels may use, unlike the function

} // namespace detail

/// m2 of a part about the mean of all `parts` parts, of which `mean_of_all` is a rounded sum: m2 + count·(mean − mean_of_all)². Where
/// the elements of the part are equal, a distance that rounding explains is none, so that equal elements have no variance.
template <class A>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr A m2_about(moments<A> const& part, A mean_of_all, int parts) {
  if (part.count == 0) return 0;
  A const distance = part.mean - mean_of_all, size = part.mean < 0 ? -part.mean : part.mean;
  A const rounding = static_cast<A>(parts + 2) * detail::epsilon<A> * size;
  if (part.m2 == 0 && distance <= rounding && -distance <= rounding) return 0;
  return part.m2 + static_cast<A>(part.count) * (distance * distance);
}

} // namespace syncnorm
