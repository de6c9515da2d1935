#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/convert.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<A, Lanes> splat(A value) {
  if constexpr (Lanes == 1) {
    return value;
  } else {
    return value - vector_t<A, Lanes>{};
  }
}

/// The elements at `from`, converted to the type of their arithmetic. Any alignment that `T` has.
template <int Lanes, class T>
[[nodiscard, gnu::always_inline]] inline vector_t<accumulate_t<T>, Lanes> load(T const* from) {
  using A = accumulate_t<T>;
  vector_t<A, Lanes> v;
  if constexpr (format_of<T> != element_format::other) {
    bits16<Lanes> bits;
    std::memcpy(&bits, from, sizeof bits);
    v = widen<format_of<T>, Lanes>(bits);
  } else if constexpr (Lanes == 1) {
    v = to_accumulate(*from);
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    vector_t<std::int8_t, Lanes> integers;
    std::memcpy(&integers, from, sizeof integers);
    v = widen_int8<Lanes>(integers);
  } else if constexpr (std::is_same_v<A, T>) {
    std::memcpy(&v, from, sizeof v);
  } else {
    std::array<A, static_cast<std::size_t>(Lanes)> values;
    for (int i = 0; i < Lanes; ++i) values[static_cast<std::size_t>(i)] = to_accumulate(from[i]);
    std::memcpy(&v, values.data(), sizeof v);
  }
  return v;
}

/// Whether a vector of `T` is written as a whole.
template <class T>
inline constexpr bool packs = std::is_same_v<accumulate_t<T>, T> || format_of<T> != element_format::other;

/// `v` as a vector of the bits of elements.
template <class T, int Lanes>
requires packs<T>
[[nodiscard, gnu::always_inline]] inline auto pack(vector_t<accumulate_t<T>, Lanes> const& v) {
  if constexpr (format_of<T> != element_format::other) {
    return narrow<format_of<T>, Lanes>(v);
  } else {
    return v;
  }
}

template <int Lanes, class T>
[[gnu::always_inline]] inline void store(T* to, vector_t<accumulate_t<T>, Lanes> const& v) {
  if constexpr (packs<T>) {
    auto const packed = pack<T, Lanes>(v);
    static_assert(sizeof packed == Lanes * sizeof(T));
    std::memcpy(static_cast<void*>(to), &packed, sizeof packed);
  } else if constexpr (Lanes == 1) {
    *to = from_accumulate<T>(v);
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    auto const integers = narrow_int8<Lanes>(v);
    std::memcpy(to, &integers, sizeof integers);
  } else {
    for (int i = 0; i < Lanes; ++i) to[i] = from_accumulate<T>(v[i]);
  }
}

/// Lanes of `a` and, counted on, of `b`, in registers.
template <class Vector, std::size_t... Lane>
[[nodiscard, gnu::always_inline]] inline auto shuffle(Vector const& a, Vector const& b, std::index_sequence<Lane...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, Lane...);
#else
  using A = std::remove_cvref_t<decltype(a[0])>;
  constexpr std::size_t lanes = sizeof(Vector) / sizeof(A);
  return vector_t<A, sizeof...(Lane)>{(Lane < lanes ? a[Lane % lanes] : b[Lane % lanes])...};
#endif
}

/// The bits of two vectors one after the other.
template <class T, int Lanes>
requires packs<T>
[[nodiscard, gnu::always_inline]] inline auto pack_two(vector_t<accumulate_t<T>, Lanes> const& v0,
                                                       vector_t<accumulate_t<T>, Lanes> const& v1) {
#if defined(__AVX2__)
  if constexpr (narrows_two<format_of<T>, Lanes>)
    return narrow_two_bfloat16<Lanes>(v0, v1);
  else
#endif
    return shuffle(pack<T, Lanes>(v0), pack<T, Lanes>(v1),
                   std::make_index_sequence<static_cast<std::size_t>(2 * Lanes)>{});
}

/// Two vectors one after the other, of any alignment.
template <int Lanes, class T>
[[gnu::always_inline]] inline void store_two(T* to, vector_t<accumulate_t<T>, Lanes> const& v0,
                                             vector_t<accumulate_t<T>, Lanes> const& v1) {
  if constexpr (narrows_two<format_of<T>, Lanes>) {
    auto const packed = pack_two<T, Lanes>(v0, v1);
    std::memcpy(static_cast<void*>(to), &packed, sizeof packed);
  } else {
    store<Lanes>(to, v0);
    store<Lanes>(to + Lanes, v1);
  }
}

/// a·b + c, rounded once where the processor can: the same bits in whatever code it is part of. Of the operators, compilers
/// contract some and not others.
template <class V>
[[nodiscard, gnu::always_inline]] inline V multiply_add(V const& a, V const& b, V const& c) {
#if defined(__FMA__)
  if constexpr (std::is_same_v<V, float>) {
    return __builtin_fmaf(a, b, c);
  } else if constexpr (std::is_same_v<V, double>) {
    return __builtin_fma(a, b, c);
  } else if constexpr (sizeof(V) == 8) { // two floats, of which processors have no vectors
    return V{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1])};
  } else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(a[0])>, float>) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
      return reinterpret<V>(_mm512_fmadd_ps(reinterpret<__m512>(a), reinterpret<__m512>(b), reinterpret<__m512>(c)));
#endif
    if constexpr (sizeof(V) == 32)
      return reinterpret<V>(_mm256_fmadd_ps(reinterpret<__m256>(a), reinterpret<__m256>(b), reinterpret<__m256>(c)));
    if constexpr (sizeof(V) == 16)
      return reinterpret<V>(_mm_fmadd_ps(reinterpret<__m128>(a), reinterpret<__m128>(b), reinterpret<__m128>(c)));
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
      return reinterpret<V>(_mm512_fmadd_pd(reinterpret<__m512d>(a), reinterpret<__m512d>(b), reinterpret<__m512d>(c)));
#endif
    if constexpr (sizeof(V) == 32)
      return reinterpret<V>(_mm256_fmadd_pd(reinterpret<__m256d>(a), reinterpret<__m256d>(b), reinterpret<__m256d>(c)));
    if constexpr (sizeof(V) == 16)
      return reinterpret<V>(_mm_fmadd_pd(reinterpret<__m128d>(a), reinterpret<__m128d>(b), reinterpret<__m128d>(c)));
  }
#endif
  return a * b + c;
}

/// Whether two vectors are loaded and stored in fewer steps where one has the elements at even places, and the other those
/// at odd ones.
template <class T, int Lanes>
inline constexpr bool weaves = Lanes > 1 && format_of<T> == element_format::bfloat16;

/// The elements of two vectors, in an order that only `store_pair` and `stream_pair` know.
template <int Lanes, class T>
[[nodiscard, gnu::always_inline]] inline std::array<vector_t<accumulate_t<T>, Lanes>, 2> load_pair(T const* from) {
  if constexpr (weaves<T, Lanes>) {
    bits16<2 * Lanes> bits;
    std::memcpy(&bits, from, sizeof bits);
    return unweave_bfloat16<Lanes>(bits);
  } else {
    return {load<Lanes>(from), load<Lanes>(from + Lanes)};
  }
}

/// Of any alignment.
template <int Lanes, class T>
[[gnu::always_inline]] inline void store_pair(T* to, std::array<vector_t<accumulate_t<T>, Lanes>, 2> const& v) {
  if constexpr (weaves<T, Lanes>) {
    auto const woven = weave_bfloat16<Lanes>(v[0], v[1]);
    std::memcpy(static_cast<void*>(to), &woven, sizeof woven);
  } else {
    store_two<Lanes>(to, v[0], v[1]);
  }
}

/// Asks for the cache lines of `Elements` elements from base[first] on, which may be outside of all memory; for the
/// second-level cache if `Level` is 2. A loop that does some arithmetic per line needs it: the processor itself looks
/// ahead only as far as it can keep instructions waiting.
template <std::int64_t Elements, int Level, class T>
[[gnu::always_inline]] inline void prefetch(T const* base, std::int64_t first) {
  auto const address = reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first) * sizeof(T);
#pragma GCC unroll 8
  for (std::uintptr_t i = 0; i < Elements * sizeof(T); i += cache_line)
    __builtin_prefetch(reinterpret_cast<void const*>(address + i), 0, Level == 1 ? 3 : 2);
}

/// The same for a level that is known only then; 0: nothing.
template <std::int64_t Elements, class T>
[[gnu::always_inline]] inline void prefetch_for(int level, T const* base, std::int64_t first) {
  if (level == 1)
    prefetch<Elements, 1>(base, first);
  else if (level == 2)
    prefetch<Elements, 2>(base, first);
}

/// Elements of a page of memory.
template <class T>
inline constexpr std::int64_t page_elements = 4096 / static_cast<std::int64_t>(sizeof(T));

/// Has the processor find the pages that begin among `n` elements from base[first] on, which may be outside of all memory, 128 at
/// most; and, if these do not follow what was found before, that of base[first]. It fetches for the first-level cache, since other
/// fetches are given up where a page is not found at once. Always inlined: a call stores registers, and where stores that stream wait
/// for memory, all others do.
template <class T>
[[gnu::always_inline]] inline void find_pages(T const* base, std::int64_t first, std::int64_t n, bool follows) {
  constexpr std::uintptr_t page = 4096;
  auto const begin = reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first) * sizeof(T);
  auto const end = begin + std::min(static_cast<std::uintptr_t>(n) * sizeof(T), 128 * page);
  if (!follows) __builtin_prefetch(reinterpret_cast<void const*>(begin), 0, 3);
  for (auto at = (begin + page - 1) / page * page; at < end; at += page)
    __builtin_prefetch(reinterpret_cast<void const*>(at), 0, 3);
}

template <std::size_t First, class Vector, std::size_t... Lane>
[[nodiscard, gnu::always_inline]] inline auto pick_lanes(Vector const& v, std::index_sequence<Lane...>) {
  return shuffle(v, v, std::index_sequence<(First + Lane)...>{});
}

/// Lanes [First, First + Count) of `v`, in registers.
template <int First, int Count, class Vector>
[[nodiscard, gnu::always_inline]] inline auto lanes_of(Vector const& v) {
  if constexpr (Count == 1)
    return v[First];
  else
    return pick_lanes<First>(v, std::make_index_sequence<static_cast<std::size_t>(Count)>{});
}

/// The sum of all lanes, pairwise.
template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline A sum_lanes(vector_t<A, Lanes> const& v) {
  if constexpr (Lanes == 1)
    return v;
  else
    return sum_lanes<A, Lanes / 2>(lanes_of<0, Lanes / 2>(v) + lanes_of<Lanes / 2, Lanes / 2>(v));
}

/// The number of each lane.
template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<A, Lanes> lane_numbers() {
  static constexpr auto numbers = [] {
    std::array<A, static_cast<std::size_t>(Lanes)> lane{};
    for (int i = 0; i < Lanes; ++i) lane[static_cast<std::size_t>(i)] = static_cast<A>(i);
    return lane;
  }();
  vector_t<A, Lanes> lane;
  std::memcpy(&lane, numbers.data(), sizeof lane);
  return lane;
}

/// `v` with all but its last `count` lanes zeroed: a vector that overlaps what was summed already adds nothing twice.
template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<A, Lanes> keep_last(vector_t<A, Lanes> const& v, int count) {
  vector_t<A, Lanes> const zero{};
  return lane_numbers<A, Lanes>() >= splat<A, Lanes>(static_cast<A>(Lanes - count)) ? v : zero;
}

/// The first `count` lanes of `a`, none if that is negative, and the others of `b`.
template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<A, Lanes>
first_lanes(vector_t<A, Lanes> const& a, vector_t<A, Lanes> const& b, std::int64_t count) {
  return lane_numbers<A, Lanes>() < splat<A, Lanes>(static_cast<A>(count)) ? a : b;
}

template <class A, int Lanes>
[[nodiscard, gnu::always_inline]] inline vector_t<double, Lanes> to_double(vector_t<A, Lanes> const& v) {
  if constexpr (std::is_same_v<A, double>) {
    return v;
  } else if constexpr (Lanes == 1) {
    return static_cast<double>(v);
  } else {
    return __builtin_convertvector(v, vector_t<double, Lanes>);
  }
}

/// A full register of `A` as one of double, its halves added before where it has more lanes.
template <class A>
[[nodiscard, gnu::always_inline]] inline vector_t<double, native_lanes<double>>
fold_to_double(vector_t<A, native_lanes<A>> const& v) {
  if constexpr (std::is_same_v<A, double>) {
    return v;
  } else {
    constexpr int half = native_lanes<double>;
    static_assert(native_lanes<A> == 2 * half);
    return to_double<A, half>(lanes_of<0, half>(v) + lanes_of<half, half>(v));
  }
}

/// The same, its halves added in double: numbers whose sum `A` may not hold.
template <class A>
[[nodiscard, gnu::always_inline]] inline vector_t<double, native_lanes<double>>
fold_in_double(vector_t<A, native_lanes<A>> const& v) {
  if constexpr (std::is_same_v<A, double>) {
    return v;
  } else {
    constexpr int half = native_lanes<double>;
    return to_double<A, half>(lanes_of<0, half>(v)) + to_double<A, half>(lanes_of<half, half>(v));
  }
}

/// `value` in the first lane, and zeros. Made in a register: a processor waits for memory before it reads a vector of which it has
/// written a part.
[[nodiscard, gnu::always_inline]] inline vector_t<double, native_lanes<double>> in_first_lane(double value) {
  vector_t<double, native_lanes<double>> v{};
  v[0] = value;
  return v;
}

/// sums[i] += v[i] for each lane.
template <class A, int Lanes>
[[gnu::always_inline]] inline void add_to_doubles(double* sums, vector_t<A, Lanes> const& v) {
  if constexpr (Lanes > native_lanes<double>) {
    constexpr int half = Lanes / 2;
    add_to_doubles<A, half>(sums, lanes_of<0, half>(v));
    add_to_doubles<A, half>(sums + half, lanes_of<half, half>(v));
  } else {
    store<Lanes>(sums, load<Lanes>(sums) + to_double<A, Lanes>(v));
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
