#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Bytes as numbers of 32 bits.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<std::uint32_t, Lanes> widen_bytes(std::uint8_t const* from) {
  vector_t<std::uint8_t, Lanes> bytes;
  std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
  if constexpr (Lanes == 16)
    return reinterpret<vector_t<std::uint32_t, 16>>(_mm512_maskz_cvtepu8_epi32(0xffff, reinterpret<__m128i>(bytes)));
#endif
#if defined(__AVX2__)
  if constexpr (Lanes == 8) {
    long long low;
    std::memcpy(&low, from, sizeof low);
    return reinterpret<vector_t<std::uint32_t, 8>>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(low)));
  }
#endif
#if SYNCNORM_HAS_SSE2
  if constexpr (Lanes == 4) {
    int low;
    std::memcpy(&low, from, sizeof low);
    __m128i const words = _mm_unpacklo_epi8(_mm_cvtsi32_si128(low), _mm_setzero_si128());
    return reinterpret<vector_t<std::uint32_t, 4>>(_mm_unpacklo_epi16(words, _mm_setzero_si128()));
  }
#endif
  // Twice as wide at a time: other conversions GCC 12 makes lane by lane.
  auto const words = __builtin_convertvector(bytes, vector_t<std::uint16_t, Lanes>);
  return __builtin_convertvector(words, vector_t<std::uint32_t, Lanes>);
}

/// Which lanes of a vector of `A` count, as the result of a comparison.
template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline auto counted_lanes(std::uint8_t const* mask) {
  if constexpr (Lanes == 1) {
    return *mask != 0;
  } else {
    auto const numbers = widen_bytes<Lanes>(mask);
    if constexpr (sizeof(A) == 8)
      return __builtin_convertvector(numbers, vector_t<std::uint64_t, Lanes>) != 0;
    else
      return numbers != 0;
  }
}

/// All lanes count.
struct every_lane {};

/// `a` in the lanes that count, and `b` in the others.
template <class V>
[[nodiscard, gnu::always_inline]] inline V where(every_lane, V const& a, V const&) {
  return a;
}
template <class V, class Lanes>
[[nodiscard, gnu::always_inline]] inline V where(Lanes const& counted, V const& a, V const& b) {
  return counted ? a : b;
}

/// The same of the two vectors that `load_pair` makes of elements of type `T`.
template <class T, int Lanes, class A = accumulate_t<T>>
[[nodiscard, gnu::always_inline]] inline auto counted_pair(std::uint8_t const* mask) {
  using lanes = decltype(counted_lanes<A, Lanes>(mask));
  if constexpr (weaves<T, Lanes>) {
    vector_t<std::uint16_t, Lanes> words;
    std::memcpy(&words, mask, sizeof words);
    auto const numbers = __builtin_convertvector(words, vector_t<std::uint32_t, Lanes>);
    return std::array<lanes, 2>{(numbers & 0xffu) != 0, numbers >> 8 != 0};
  } else {
    return std::array<lanes, 2>{counted_lanes<A, Lanes>(mask), counted_lanes<A, Lanes>(mask + Lanes)};
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
