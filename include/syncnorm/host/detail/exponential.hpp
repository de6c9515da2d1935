#pragma once

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <syncnorm/host/detail/convert.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// What the lanes of a vector are; a number is a vector of one.
template <class V>
struct lane_traits {
  using type = std::remove_cvref_t<decltype(std::declval<V const&>()[0])>;
  static constexpr int count = static_cast<int>(sizeof(V) / sizeof(type));
};
template <std::floating_point A>
struct lane_traits<A> {
  using type = A;
  static constexpr int count = 1;
};

/// eᵛ = scale + scale·rest, where scale is a power of two and |v − log scale| hardly more than log 2/2.
template <class V>
struct exponential_parts {
  V scale, rest;
};

/// Of v from the logarithm of the least normal number to 0, to which others are taken; of what is no number `rest` is none.
template <class V>
[[nodiscard, gnu::always_inline]] inline exponential_parts<V> parts_of_exponential(V const& v) {
  using A = typename lane_traits<V>::type;
  using integer = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
  using limits = std::numeric_limits<A>;
  constexpr int lanes = lane_traits<V>::count;
  using integers = vector_t<integer, lanes>;
  constexpr long double log_2 = 0.693147180559945309417L;

  V const zero{}, least = zero + static_cast<A>((limits::min_exponent - 1) * log_2);
  V x = v < least ? least : v;
  x = zero < x ? zero : x;

  // The next integer to x/log 2, of which the conversion cuts off what is behind the point.
  V const to_cut = x * static_cast<A>(1 / log_2) - A(0.5);
  integers k;
  V multiple;
  if constexpr (lanes == 1) {
    k = static_cast<std::int32_t>(std::isnan(to_cut) ? zero : to_cut);
    multiple = static_cast<A>(k);
  } else {
    auto const cut = __builtin_convertvector(to_cut, vector_t<std::int32_t, lanes>);
    k = __builtin_convertvector(cut, integers);
    multiple = __builtin_convertvector(cut, V);
  }
  // Of so few bits that its multiples are exact.
  constexpr long double most_of_log_2 = 355.0L / 512;
  V const r = x - multiple * static_cast<A>(most_of_log_2) - multiple * static_cast<A>(log_2 - most_of_log_2);

  // eʳ − 1 = r + r²·(1/2! + r/3! + …), to less than half of its last bit.
  constexpr std::size_t degree = sizeof(A) == 4 ? 7 : 13;
  constexpr auto inverse_factorials = [] {
    std::array<A, degree + 1> values{};
    long double factorial = 1;
    for (std::size_t n = 1; n <= degree; ++n)
      values[n] = static_cast<A>(1 / (factorial *= static_cast<long double>(n)));
    return values;
  }();
  V series = zero + inverse_factorials[degree];
#pragma GCC unroll 16
  for (std::size_t n = degree - 1; n >= 2; --n) series = multiply_add<V>(series, r, zero + inverse_factorials[n]);
  constexpr integer bias = limits::max_exponent - 1;
  constexpr int digits = limits::digits - 1;
  return {reinterpret<V>(static_cast<integers>((k + bias) << digits)), multiply_add<V>(r * r, series, r)};
}

/// eᵛ − 1 of v <= 0.
template <class V>
[[nodiscard, gnu::always_inline]] inline V exponential_minus_1(V const& v) {
  auto const [scale, rest] = parts_of_exponential(v);
  V const zero{};
  return multiply_add<V>(scale, rest, scale - (zero + typename lane_traits<V>::type{1}));
}

/// eᵛ of v <= 0.
template <class V>
[[nodiscard, gnu::always_inline]] inline V exponential(V const& v) {
  auto const [scale, rest] = parts_of_exponential(v);
  return multiply_add<V>(scale, rest, scale);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
