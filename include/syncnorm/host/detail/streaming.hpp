#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <syncnorm/config.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/convert.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Whether `stream` bypasses the cache for vectors of elements of type `T`.
template <class T>
inline constexpr bool can_stream =
#if SYNCNORM_HAS_SSE2
    packs<T>;
#else
    false;
#endif

/// A store of `bits` that bypasses the cache, if there is one of their size.
template <class Bits>
[[gnu::always_inline]] inline void stream_bits(void* to, Bits const& bits) {
  constexpr std::size_t bytes = sizeof bits;
#if SYNCNORM_HAS_SSE2
  if constexpr (bytes == 4) {
    _mm_stream_si32(static_cast<int*>(to), reinterpret<int>(bits));
    return;
  } else if constexpr (bytes == 8) {
    _mm_stream_si64(static_cast<long long*>(to), reinterpret<long long>(bits));
    return;
  } else if constexpr (bytes == 16) {
    _mm_stream_si128(static_cast<__m128i*>(to), reinterpret<__m128i>(bits));
    return;
  }
#if defined(__AVX__)
  else if constexpr (bytes == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), reinterpret<__m256i>(bits));
    return;
  }
#endif
#if defined(__AVX512F__)
  else if constexpr (bytes == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret<__m512i>(bits));
    return;
  }
#endif
#endif
  std::memcpy(to, &bits, bytes);
}

/// A store that bypasses the cache. Full vectors must be aligned to their size; `stream_fence` must follow before the
/// writing thread tells another of the data.
template <int Lanes, class T>
[[gnu::always_inline]] inline void stream(T* to, vector_t<accumulate_t<T>, Lanes> const& v) {
  if constexpr (can_stream<T>)
    stream_bits(to, pack<T, Lanes>(v));
  else
    store<Lanes>(to, v);
}

/// Elements of a full register, to which streamed runs are aligned.
template <class T>
inline constexpr int stream_lanes = simd_bytes / static_cast<int>(sizeof(T));

/// Elements from the last line of the cache that begins before `to`, or there.
template <class T>
[[nodiscard, gnu::always_inline]] inline std::int64_t elements_since_line(T const* to) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % cache_line / sizeof(T));
}

/// Elements from the last place before `to`, or there, that a full register may be streamed to.
template <class T>
[[nodiscard, gnu::always_inline]] inline std::int64_t elements_since_vector(T const* to) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % simd_bytes / sizeof(T));
}

/// Lanes [first, last) of `v`, each to its place from `to` on, and no other; past the cache if `Stream`, but for 16-bit elements: a line
/// of which the cache gets a part has to be read first, but where a part of it comes in vectors, which of 16 bits are half a line, and
/// another past the cache, both take several times as long.
template <bool Stream, int Lanes, class T>
[[gnu::always_inline]] inline void put_lanes(T* to, vector_t<accumulate_t<T>, Lanes> const& v, std::int64_t first,
                                             std::int64_t last) {
  std::array<T, static_cast<std::size_t>(Lanes)> all;
  store<Lanes>(all.data(), v);
  if constexpr (Stream && can_stream<T> && sizeof(T) >= 4) {
    for (; first < last; ++first) stream_bits(to + first, all[static_cast<std::size_t>(first)]);
  } else {
    std::memcpy(static_cast<void*>(to + first), all.data() + first, static_cast<std::size_t>(last - first) * sizeof(T));
  }
}

/// Two vectors one after the other: as one, where they fill a register together. Aligned to that.
template <int Lanes, class T>
[[gnu::always_inline]] inline void stream_two(T* to, vector_t<accumulate_t<T>, Lanes> const& v0,
                                              vector_t<accumulate_t<T>, Lanes> const& v1) {
  if constexpr (can_stream<T> && stream_lanes<T> == 2 * Lanes) {
    stream_bits(to, pack_two<T, Lanes>(v0, v1));
  } else {
    stream<Lanes>(to, v0);
    stream<Lanes>(to + Lanes, v1);
  }
}

/// Aligned like `stream_two`.
template <int Lanes, class T>
[[gnu::always_inline]] inline void stream_pair(T* to, std::array<vector_t<accumulate_t<T>, Lanes>, 2> const& v) {
  if constexpr (!weaves<T, Lanes>)
    stream_two<Lanes>(to, v[0], v[1]);
  else if constexpr (can_stream<T> && stream_lanes<T> == 2 * Lanes)
    stream_bits(to, weave_bfloat16<Lanes>(v[0], v[1]));
  else
    store_pair<Lanes>(to, v);
}

/// Makes the streamed stores of this thread visible before what it stores next.
[[gnu::always_inline]] inline void stream_fence() {
#if SYNCNORM_HAS_SSE2
  _mm_sfence();
#endif
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
