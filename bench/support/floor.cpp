#include "support/floor.hpp"

#include <algorithm>
#include <cstring>

#include <immintrin.h>

namespace bench {

namespace {

#if defined(__AVX512F__)
using vector = __m512i;
vector load(char const* p) { return _mm512_loadu_si512(p); }
vector either(vector a, vector b) { return _mm512_or_si512(a, b); }
void stream(char* p, vector v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
#elif defined(__AVX2__)
using vector = __m256i;
vector load(char const* p) { return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)); }
vector either(vector a, vector b) { return _mm256_or_si256(a, b); }
void stream(char* p, vector v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
#else
using vector = __m128i;
vector load(char const* p) { return _mm_loadu_si128(reinterpret_cast<__m128i const*>(p)); }
vector either(vector a, vector b) { return _mm_or_si128(a, b); }
void stream(char* p, vector v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), v); }
#endif

constexpr std::int64_t width = sizeof(vector), unroll = 4, part = 1 << 18;

template <bool Two>
void copy_part(char* out, char const* a, char const* b, std::int64_t bytes) {
  std::int64_t i = 0;
  for (; i + unroll * width <= bytes; i += unroll * width)
    for (std::int64_t u = 0; u < unroll; ++u) {
      auto const at = i + u * width;
      if constexpr (Two)
        stream(out + at, either(load(a + at), load(b + at)));
      else
        stream(out + at, load(a + at));
    }
  std::memcpy(out + i, a + i, static_cast<std::size_t>(bytes - i));
  _mm_sfence();
}

template <bool Two>
void read_part(char const* a, char const* b, std::int64_t bytes) {
  vector sums[unroll] = {};
  for (std::int64_t i = 0; i + unroll * width <= bytes; i += unroll * width)
    for (std::int64_t u = 0; u < unroll; ++u) {
      auto const at = i + u * width;
      sums[u] = either(sums[u], load(a + at));
      if constexpr (Two) sums[u] = either(sums[u], load(b + at));
    }
  auto const all = either(either(sums[0], sums[1]), either(sums[2], sums[3]));
  asm volatile("" : : "v"(all)); // or nothing would be read
}

} // namespace

void floor_read(void const* a, void const* b, std::int64_t bytes, int threads) {
  auto const* const from = static_cast<char const*>(a);
  auto const* const also = static_cast<char const*>(b);
  std::int64_t const parts = (bytes + part - 1) / part;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && parts > 1)
  for (std::int64_t k = 0; k < parts; ++k) {
    std::int64_t const at = k * part, n = std::min(part, bytes - at);
    if (also != nullptr)
      read_part<true>(from + at, also + at, n);
    else
      read_part<false>(from + at, nullptr, n);
  }
}

void floor_copy(void* out, void const* a, void const* b, std::int64_t bytes, int threads) {
  auto* const to = static_cast<char*>(out);
  auto const* const from = static_cast<char const*>(a);
  auto const* const also = static_cast<char const*>(b);
  std::int64_t const parts = (bytes + part - 1) / part;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && parts > 1)
  for (std::int64_t k = 0; k < parts; ++k) {
    std::int64_t const at = k * part, n = std::min(part, bytes - at);
    if (also != nullptr)
      copy_part<true>(to + at, from + at, also + at, n);
    else
      copy_part<false>(to + at, from + at, nullptr, n);
  }
}

} // namespace bench
