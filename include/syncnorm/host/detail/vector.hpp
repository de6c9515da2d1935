#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/detail/cache_line.hpp>

#if defined(__AVX__)
#include <immintrin.h>
#elif SYNCNORM_HAS_SSE2
#include <emmintrin.h>
#endif

// Vectors are those of GCC and clang, in the widest registers that the translation unit is compiled for. A kernel is
// a template over its vector type, and a plain `float` or `double` serves as the vector of one lane. Whatever it calls for
// each vector is always inlined, and loops over what a vector consists of are unrolled: a call, or a vector that goes through
// memory, takes longer than the arithmetic, and compilers that optimize a little less make them.
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

inline constexpr int simd_bytes = SYNCNORM_VECTOR_BYTES;

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

using syncnorm::detail::cache_line;

/// Elements of a line of the cache.
template <class T>
inline constexpr std::int64_t line_elements = static_cast<std::int64_t>(cache_line / sizeof(T));

/// Lanes of a full register.
template <class A>
inline constexpr int native_lanes = simd_bytes / static_cast<int>(sizeof(A));

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
