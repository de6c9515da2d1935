#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/core/element.hpp>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__x86_64__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

// Vectors are those of GCC and clang, in the widest registers that the translation unit is compiled for. A kernel is
// a template over its vector type, and a plain `float` or `double` serves as the vector of one lane.
namespace syncnorm::host::detail {

#if defined(__AVX512F__)
inline constexpr int simd_bytes = 64;
#elif defined(__AVX__)
inline constexpr int simd_bytes = 32;
#else
inline constexpr int simd_bytes = 16;
#endif

template <class A, int Lanes>
struct vector_of {
  typedef A type __attribute__((vector_size(sizeof(A) * Lanes)));
};
template <class A>
struct vector_of<A, 1> {
  using type = A;
};

/// `Lanes` values of type `A`.
template <class A, int Lanes>
using vector_t = typename vector_of<A, Lanes>::type;

/// Lanes of a full register.
template <class A>
inline constexpr int native_lanes = simd_bytes / static_cast<int>(sizeof(A));

template <class A, int Lanes>
[[nodiscard]] inline vector_t<A, Lanes> splat(A value) {
  if constexpr (Lanes == 1) {
    return value;
  } else {
    return value - vector_t<A, Lanes>{};
  }
}

/// The elements at `from`, converted to the type of their arithmetic. Any alignment that `T` has.
template <int Lanes, class T>
[[nodiscard]] inline vector_t<accumulate_t<T>, Lanes> load(T const* from) {
  using A = accumulate_t<T>;
  vector_t<A, Lanes> v;
  if constexpr (Lanes == 1) {
    v = static_cast<A>(*from);
  } else if constexpr (std::is_same_v<A, T>) {
    std::memcpy(&v, from, sizeof v);
  } else {
    std::array<A, Lanes> values;
    for (int i = 0; i < Lanes; ++i) values[static_cast<std::size_t>(i)] = static_cast<A>(from[i]);
    std::memcpy(&v, values.data(), sizeof v);
  }
  return v;
}

template <int Lanes, class T>
inline void store(T* to, vector_t<accumulate_t<T>, Lanes> const& v) {
  using A = accumulate_t<T>;
  if constexpr (Lanes == 1) {
    *to = static_cast<T>(v);
  } else if constexpr (std::is_same_v<A, T>) {
    std::memcpy(to, &v, sizeof v);
  } else {
    for (int i = 0; i < Lanes; ++i) to[i] = static_cast<T>(v[i]);
  }
}

/// Whether `stream` bypasses the cache for elements of type `T`.
template <class T>
inline constexpr bool can_stream =
#if defined(__x86_64__) && defined(__SSE2__)
    std::is_same_v<T, float> || std::is_same_v<T, double>;
#else
    false;
#endif

/// A store that bypasses the cache. Full registers must be aligned to their size; `stream_fence` must follow before
/// the writing thread tells another of the data.
template <int Lanes, class T>
inline void stream(T* to, vector_t<accumulate_t<T>, Lanes> const& v) {
  if constexpr (!can_stream<T>) {
    store<Lanes>(to, v);
  } else {
#if defined(__x86_64__) && defined(__SSE2__)
    constexpr std::size_t bytes = sizeof v;
    if constexpr (bytes == 4) {
      int bits;
      std::memcpy(&bits, &v, sizeof bits);
      _mm_stream_si32(reinterpret_cast<int*>(to), bits);
    } else if constexpr (bytes == 8) {
      long long bits;
      std::memcpy(&bits, &v, sizeof bits);
      _mm_stream_si64(reinterpret_cast<long long*>(to), bits);
    } else if constexpr (bytes == 16) {
      __m128i bits;
      std::memcpy(&bits, &v, sizeof bits);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits);
    }
#if defined(__AVX__)
    else if constexpr (bytes == 32) {
      __m256i bits;
      std::memcpy(&bits, &v, sizeof bits);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
    }
#endif
#if defined(__AVX512F__)
    else if constexpr (bytes == 64) {
      __m512i bits;
      std::memcpy(&bits, &v, sizeof bits);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    }
#endif
    else {
      store<Lanes>(to, v);
    }
#endif
  }
}

/// Makes the streamed stores of this thread visible before what it stores next.
inline void stream_fence() {
#if defined(__x86_64__) && defined(__SSE2__)
  _mm_sfence();
#endif
}

/// Asks for the cache lines of `Elements` elements from base[first] on, which may be outside of all memory; for the
/// second-level cache if `Level` is 2. A loop that does some arithmetic per line needs it: the processor itself looks
/// ahead only as far as it can keep instructions waiting.
template <std::int64_t Elements, int Level = 1, class T>
inline void prefetch(T const* base, std::int64_t first) {
  auto const address = reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first) * sizeof(T);
#pragma GCC unroll 8
  for (std::uintptr_t i = 0; i < Elements * sizeof(T); i += 64)
    __builtin_prefetch(reinterpret_cast<void const*>(address + i), 0, Level == 1 ? 3 : 2);
}

/// The sum of all lanes, pairwise.
template <class A, int Lanes>
[[nodiscard]] inline A sum_lanes(vector_t<A, Lanes> const& v) {
  if constexpr (Lanes == 1) {
    return v;
  } else {
    struct halves {
      vector_t<A, Lanes / 2> low, high;
    } parts;
    static_assert(sizeof parts == sizeof v);
    std::memcpy(&parts, &v, sizeof v);
    return sum_lanes<A, Lanes / 2>(parts.low + parts.high);
  }
}

/// `v` with all but its last `count` lanes zeroed: a vector that overlaps what was summed already adds nothing twice.
template <class A, int Lanes>
[[nodiscard]] inline vector_t<A, Lanes> keep_last(vector_t<A, Lanes> const& v, int count) {
  static constexpr auto numbers = [] {
    std::array<A, static_cast<std::size_t>(Lanes)> lane{};
    for (int i = 0; i < Lanes; ++i) lane[static_cast<std::size_t>(i)] = static_cast<A>(i);
    return lane;
  }();
  vector_t<A, Lanes> lane;
  std::memcpy(&lane, numbers.data(), sizeof lane);
  vector_t<A, Lanes> const zero{};
  return lane >= splat<A, Lanes>(static_cast<A>(Lanes - count)) ? v : zero;
}

template <class A, int Lanes>
[[nodiscard]] inline vector_t<double, Lanes> to_double(vector_t<A, Lanes> const& v) {
  if constexpr (std::is_same_v<A, double>) {
    return v;
  } else if constexpr (Lanes == 1) {
    return static_cast<double>(v);
  } else {
    return __builtin_convertvector(v, vector_t<double, Lanes>);
  }
}

} // namespace syncnorm::host::detail
