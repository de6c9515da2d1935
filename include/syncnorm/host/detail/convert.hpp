#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/detail/vector.hpp>

// Vectors of 16-bit elements to and from vectors of float, with the results of core/half.hpp bit by bit; and of 8-bit integers.
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

template <int Lanes>
using bits16 = vector_t<std::uint16_t, Lanes>;

template <class To, class From>
[[nodiscard, gnu::always_inline]] inline To reinterpret(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<float, Lanes> widen_binary16(bits16<Lanes> const& bits) {
#if defined(__AVX512F__)
  // The forms with a mask: of the plain ones GCC 12 says that they use what is uninitialized.
  if constexpr (Lanes == 16)
    return reinterpret<vector_t<float, 16>>(_mm512_maskz_cvtph_ps(0xffff, reinterpret<__m256i>(bits)));
#endif
#if defined(__F16C__)
  if constexpr (Lanes == 8) return reinterpret<vector_t<float, 8>>(_mm256_cvtph_ps(reinterpret<__m128i>(bits)));
  if constexpr (Lanes == 4)
    return reinterpret<vector_t<float, 4>>(_mm_cvtph_ps(_mm_cvtsi64_si128(reinterpret<long long>(bits))));
#endif
  using wide = vector_t<std::uint32_t, Lanes>;
  using real = vector_t<float, Lanes>;
  wide const all = __builtin_convertvector(bits, wide);
  wide const sign = (all & 0x8000u) << 16, magnitude = all & 0x7fffu;
  real const subnormal =
      __builtin_convertvector(reinterpret<vector_t<std::int32_t, Lanes>>(magnitude), real) * 0x1p-24f;
  wide const normal = (magnitude << 13) + 0x38000000u;
  wide const special = magnitude << 13 | 0x7f800000u;
  wide value = magnitude < 0x400u ? reinterpret<wide>(subnormal) : normal;
  value = magnitude >= 0x7c00u ? special : value;
  value = magnitude > 0x7c00u ? value | 0x400000u : value;
  return reinterpret<real>(sign | value);
}

template <int Lanes>
[[nodiscard, gnu::always_inline]] inline bits16<Lanes> narrow_binary16(vector_t<float, Lanes> const& v) {
#if defined(__AVX512F__)
  if constexpr (Lanes == 16)
    return reinterpret<bits16<16>>(_mm512_maskz_cvtps_ph(0xffff, reinterpret<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  if constexpr (Lanes == 8)
    return reinterpret<bits16<8>>(_mm256_cvtps_ph(reinterpret<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  if constexpr (Lanes == 4) {
    long long const low = _mm_cvtsi128_si64(_mm_cvtps_ph(reinterpret<__m128>(v), _MM_FROUND_TO_NEAREST_INT));
    return reinterpret<bits16<4>>(low);
  }
#endif
  using wide = vector_t<std::uint32_t, Lanes>;
  using real = vector_t<float, Lanes>;
  wide const all = reinterpret<wide>(v), sign = all >> 16 & 0x8000u, magnitude = all & 0x7fffffffu;
  wide const subnormal = reinterpret<wide>(reinterpret<real>(magnitude) + 0.5f) - 0x3f000000u;
  wide const normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  wide const nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  wide const zero{};
  wide bits = magnitude < 0x38800000u ? subnormal : normal;
  bits = magnitude >= 0x47800000u ? zero + 0x7c00u : bits;
  bits = magnitude > 0x7f800000u ? nan : bits;
  return __builtin_convertvector(sign | bits, bits16<Lanes>);
}

#if defined(__AVX512BW__)

/// The words `source(i)` of `v` for i < 32, as far as `Kept` has a bit for them, and else 0; by bytes where that is one step
/// instead of two.
template <__mmask32 Kept, class Source>
[[nodiscard, gnu::always_inline]] inline __m512i permute_words(__m512i v, Source) {
#if defined(__AVX512VBMI__)
  alignas(64) static constexpr auto bytes = [] {
    std::array<std::uint8_t, 64> all{};
    for (int i = 0; i < 64; ++i)
      all[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(2 * Source{}(i / 2) + i % 2);
    return all;
  }();
  constexpr __mmask64 kept = [] {
    __mmask64 both = 0;
    for (int i = 0; i < 32; ++i) both |= (Kept >> i & 1 ? __mmask64{3} : 0) << (2 * i);
    return both;
  }();
  return _mm512_maskz_permutexvar_epi8(kept, reinterpret<__m512i>(bytes), v);
#else
  alignas(64) static constexpr auto words = [] {
    std::array<std::uint16_t, 32> all{};
    for (int i = 0; i < 32; ++i) all[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(Source{}(i));
    return all;
  }();
  return _mm512_maskz_permutexvar_epi16(Kept, reinterpret<__m512i>(words), v);
#endif
}

/// Floats rounded to bfloat16, which is the upper half of each; what is no number may become one.
[[nodiscard, gnu::always_inline]] inline __m512i round_to_bfloat16(__m512i v) {
  auto const odd = _mm512_test_epi32_mask(v, _mm512_set1_epi32(0x10000));
  return _mm512_mask_add_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(0x7fff)), odd, v, _mm512_set1_epi32(0x8000));
}

#elif defined(__AVX2__)

[[nodiscard, gnu::always_inline]] inline __m256i round_to_bfloat16(__m256i v) {
  auto const odd = _mm256_and_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(0x7fff)), odd);
}

#endif

/// Floats rounded to bfloat16, which is the upper half of each.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<std::uint32_t, Lanes>
upper_bfloat16(vector_t<float, Lanes> const& v) {
  using wide = vector_t<std::uint32_t, Lanes>;
  wide const all = reinterpret<wide>(v), rounded = all + 0x7fffu + (all >> 16 & 1u);
#if defined(__AVX512F__)
  if constexpr (Lanes == 16) {
    auto const real = reinterpret<__m512>(v);
    return reinterpret<wide>(_mm512_mask_or_epi32(reinterpret<__m512i>(rounded),
                                                  _mm512_cmp_ps_mask(real, real, _CMP_UNORD_Q),
                                                  reinterpret<__m512i>(all), _mm512_set1_epi32(0x400000)));
  }
#endif
  return (all & 0x7fffffffu) > 0x7f800000u ? all | 0x400000u : rounded;
}

/// Two vectors of these, in fewer steps than each by itself.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline std::array<vector_t<std::uint32_t, Lanes>, 2>
two_upper_bfloat16(vector_t<float, Lanes> const& v0, vector_t<float, Lanes> const& v1) {
#if defined(__AVX512BW__) || defined(__AVX2__)
  using wide = vector_t<std::uint32_t, Lanes>;
#endif
#if defined(__AVX512BW__)
  if constexpr (Lanes == 16) {
    auto const either = _mm512_cmp_ps_mask(reinterpret<__m512>(v0), reinterpret<__m512>(v1), _CMP_UNORD_Q);
    if (__builtin_expect(either == 0, 1))
      return {reinterpret<wide>(round_to_bfloat16(reinterpret<__m512i>(v0))),
              reinterpret<wide>(round_to_bfloat16(reinterpret<__m512i>(v1)))};
  }
#elif defined(__AVX2__)
  if constexpr (Lanes == 8) {
    auto const either = _mm256_cmp_ps(reinterpret<__m256>(v0), reinterpret<__m256>(v1), _CMP_UNORD_Q);
    if (__builtin_expect(_mm256_movemask_ps(either) == 0, 1))
      return {reinterpret<wide>(round_to_bfloat16(reinterpret<__m256i>(v0))),
              reinterpret<wide>(round_to_bfloat16(reinterpret<__m256i>(v1)))};
  }
#endif
  return {upper_bfloat16<Lanes>(v0), upper_bfloat16<Lanes>(v1)};
}

/// Two vectors of bfloat16 as floats: the elements at even places, and those at odd ones. Fewer steps than in their order.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline std::array<vector_t<float, Lanes>, 2>
unweave_bfloat16(bits16<2 * Lanes> const& bits) {
  using wide = vector_t<std::uint32_t, Lanes>;
  auto const all = reinterpret<wide>(bits);
  return {reinterpret<vector_t<float, Lanes>>(all << 16), reinterpret<vector_t<float, Lanes>>(all & 0xffff0000u)};
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

/// Whether `convert_two_bfloat16` is right: what is subnormal it makes 0.
[[nodiscard, gnu::always_inline]] inline bool none_subnormal(__m512 v0, __m512 v1) {
  constexpr int subnormal = 0x20;
  return _kortestz_mask16_u8(_mm512_fpclass_ps_mask(v0, subnormal), _mm512_fpclass_ps_mask(v1, subnormal)) != 0;
}

/// Two vectors one after the other, by the processor's own conversion.
[[nodiscard, gnu::always_inline]] inline __m512i convert_two_bfloat16(__m512 v0, __m512 v1) {
  return reinterpret<__m512i>(_mm512_cvtne2ps_pbh(v1, v0));
}

#endif

/// The inverse, which rounds.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline bits16<2 * Lanes> weave_bfloat16(vector_t<float, Lanes> const& even,
                                                                          vector_t<float, Lanes> const& odd) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
  if constexpr (Lanes == 16) {
    auto const v0 = reinterpret<__m512>(even), v1 = reinterpret<__m512>(odd);
    if (__builtin_expect(none_subnormal(v0, v1), 1))
      return reinterpret<bits16<32>>(
          permute_words<0xffffffffU>(convert_two_bfloat16(v0, v1), [](int i) { return i % 2 * 16 + i / 2; }));
  }
#endif
  auto const [first, second] = two_upper_bfloat16<Lanes>(even, odd);
#if defined(__AVX2__)
  if constexpr (Lanes == 8)
    return reinterpret<bits16<16>>(
        _mm256_blend_epi16(reinterpret<__m256i>(first >> 16), reinterpret<__m256i>(second), 0xaa));
#endif
  return reinterpret<bits16<2 * Lanes>>(first >> 16 | (second & 0xffff0000u));
}

#if defined(__AVX2__)

/// Two vectors one after the other, in fewer steps than each by itself.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline bits16<2 * Lanes> narrow_two_bfloat16(vector_t<float, Lanes> const& v0,
                                                                               vector_t<float, Lanes> const& v1) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
  auto const first = reinterpret<__m512>(v0), second = reinterpret<__m512>(v1);
  if (__builtin_expect(none_subnormal(first, second), 1))
    return reinterpret<bits16<32>>(convert_two_bfloat16(first, second));
#endif
#if defined(__AVX512BW__)
  auto const mixed = reinterpret<__m512i>(weave_bfloat16<Lanes>(v0, v1));
  return reinterpret<bits16<32>>(permute_words<0xffffffffU>(mixed, [](int i) { return i < 16 ? 2 * i : 2 * i - 31; }));
#else
  auto const [first, second] = two_upper_bfloat16<Lanes>(v0, v1);
  // By halves of a register: those of the first vector come first and third.
  auto const packed = _mm256_packus_epi32(reinterpret<__m256i>(first >> 16), reinterpret<__m256i>(second >> 16));
  return reinterpret<bits16<16>>(_mm256_permute4x64_epi64(packed, 0xd8));
#endif
}

#endif

template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<float, Lanes> widen_bfloat16(bits16<Lanes> const& bits) {
#if defined(__AVX512BW__)
  // Each word to the upper half of its own 32 bits, in one step.
  if constexpr (Lanes == 16)
    return reinterpret<vector_t<float, 16>>(
        permute_words<0xaaaaaaaaU>(_mm512_castsi256_si512(reinterpret<__m256i>(bits)), [](int i) { return i / 2; }));
#elif defined(__AVX512F__)
  if constexpr (Lanes == 16)
    return reinterpret<vector_t<float, 16>>(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret<__m256i>(bits)), 16));
#endif
#if defined(__AVX2__)
  if constexpr (Lanes == 8)
    return reinterpret<vector_t<float, 8>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(reinterpret<__m128i>(bits)), 16));
#endif
  return reinterpret<vector_t<float, Lanes>>(__builtin_convertvector(bits, vector_t<std::uint32_t, Lanes>) << 16);
}

template <int Lanes>
[[nodiscard, gnu::always_inline]] inline bits16<Lanes> narrow_bfloat16(vector_t<float, Lanes> const& v) {
  auto const bits32 = upper_bfloat16<Lanes>(v) >> 16;
#if defined(__AVX512F__)
  if constexpr (Lanes == 16)
    return reinterpret<bits16<16>>(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret<__m512i>(bits32)));
#endif
#if defined(__AVX2__)
  if constexpr (Lanes == 8) {
    auto const bits = reinterpret<__m256i>(bits32);
    return reinterpret<bits16<8>>(_mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
#endif
  return __builtin_convertvector(bits32, bits16<Lanes>);
}

/// One element.
template <element_format Format>
[[nodiscard, gnu::always_inline]] inline float widen(std::uint16_t bits) {
#if defined(__F16C__)
  if constexpr (Format == element_format::binary16) return _cvtsh_ss(bits);
#endif
  return Format == element_format::binary16 ? syncnorm::detail::from_binary16(bits)
                                            : syncnorm::detail::from_bfloat16(bits);
}

template <element_format Format>
[[nodiscard, gnu::always_inline]] inline std::uint16_t narrow(float value) {
#if defined(__F16C__)
  if constexpr (Format == element_format::binary16)
    return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
#endif
  return Format == element_format::binary16 ? syncnorm::detail::to_binary16(value)
                                            : syncnorm::detail::to_bfloat16(value);
}

template <element_format Format, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<float, Lanes> widen(bits16<Lanes> const& bits) {
  if constexpr (Lanes == 1) {
    return widen<Format>(bits);
  } else if constexpr (Format == element_format::binary16) {
    return widen_binary16<Lanes>(bits);
  } else {
    return widen_bfloat16<Lanes>(bits);
  }
}

/// Whether there is a `narrow_two` that is faster than `narrow` of each.
template <element_format Format, int Lanes>
inline constexpr bool narrows_two =
#if defined(__AVX512BW__)
    Format == element_format::bfloat16&& Lanes == 16;
#elif defined(__AVX2__)
    Format == element_format::bfloat16&& Lanes == 8;
#else
    false;
#endif

template <element_format Format, int Lanes>
[[nodiscard, gnu::always_inline]] inline bits16<Lanes> narrow(vector_t<float, Lanes> const& v) {
  if constexpr (Lanes == 1) {
    return narrow<Format>(v);
  } else if constexpr (Format == element_format::binary16) {
    return narrow_binary16<Lanes>(v);
  } else {
    return narrow_bfloat16<Lanes>(v);
  }
}

template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<float, Lanes>
widen_int8(vector_t<std::int8_t, Lanes> const& integers) {
#if defined(__AVX512F__)
  if constexpr (Lanes == 16)
    return reinterpret<vector_t<float, 16>>(
        _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, reinterpret<__m128i>(integers))));
#endif
  // Step by step, which is a few instructions each.
  auto const wider = __builtin_convertvector(integers, vector_t<std::int16_t, Lanes>);
  return __builtin_convertvector(__builtin_convertvector(wider, vector_t<std::int32_t, Lanes>), vector_t<float, Lanes>);
}

/// As `element_traits<std::int8_t>`.
template <int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<std::int8_t, Lanes> narrow_int8(vector_t<float, Lanes> const& v) {
#if defined(__AVX512F__)
  // What is no number, and what is less than an integer holds, becomes the least one.
  if constexpr (Lanes == 16) {
    auto const held = _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(127.0F), reinterpret<__m512>(v));
    return reinterpret<vector_t<std::int8_t, 16>>(
        _mm512_maskz_cvtsepi32_epi8(0xffff, _mm512_maskz_cvtps_epi32(0xffff, held)));
  }
#endif
  using real = vector_t<float, Lanes>;
  using integers = vector_t<std::int32_t, Lanes>;
  real const zero{}, first = zero - 128.0F, last = zero + 127.0F, shift = zero + 0x1.8p23F;
  real held = v > first ? v : first;
  held = held < last ? held : last;
  auto const wide = reinterpret<integers>(held + shift) - reinterpret<integers>(shift);
  return __builtin_convertvector(__builtin_convertvector(wide, vector_t<std::int16_t, Lanes>),
                                 vector_t<std::int8_t, Lanes>);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
