#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Elements whose mean is the pivot of short rows.
inline constexpr std::int64_t short_row_pilot = 16;

/// Asks for a vector of elements that is read some rows later.
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(T const* x, std::int64_t i) {
  constexpr auto bytes = static_cast<std::int64_t>(sizeof(T));
  prefetch<native_lanes<accumulate_t<T>>>(x, i + lookahead_bytes / bytes);
}

/// Whether rows are taken by `short_row_sums`.
[[nodiscard]] constexpr bool are_short_rows(std::int64_t spatial) {
  return spatial >= short_row_pilot && spatial < groups::long_piece;
}

/// Two sums over short rows: of as many as make up a long piece in `A`, and of these in double. `Terms` has
///
///     std::array<vector_t<A, native_lanes<A>>, 2> at(row, position)     what is to be summed
///     void prefetch(row, position)
template <class A, class Terms>
class short_row_sums {
  static constexpr int lanes = native_lanes<A>;
  using vector = vector_t<A, lanes>;
  using pair = std::array<vector, 2>;

public:
  explicit short_row_sums(Terms const& terms) : terms_{terms} {}

  /// The sums over rows [begin, end) of `n` elements.
  [[nodiscard]] std::array<double, 2> operator()(std::int64_t begin, std::int64_t end, std::int64_t n) const {
    std::int64_t const at_once = ceil_div(groups::long_piece, n);
    std::array<double, 2> all{};
    for (; begin < end; begin += at_once) {
      std::int64_t const last = std::min(end, begin + at_once);
      auto const some = vectors(begin, last, n);
      all[0] += static_cast<double>(some[0]);
      all[1] += static_cast<double>(some[1]);
    }
    return all;
  }

private:
  [[gnu::always_inline]] static void add(pair& to, pair const& more) {
    to[0] += more[0];
    to[1] += more[1];
  }

  [[gnu::always_inline]] void take(pair& to, std::int64_t row, std::int64_t i) const {
    terms_.prefetch(row, i);
    add(to, terms_.at(row, i));
  }

  [[nodiscard]] std::array<A, 2> vectors(std::int64_t begin, std::int64_t end, std::int64_t n) const {
    constexpr int L = lanes;
    pair s0{}, s1{}, s2{}, s3{};
    auto const rest = static_cast<int>(n % L);
    for (std::int64_t row = begin; row < end; ++row) {
      std::int64_t i = 0;
      for (; i + 4 * L <= n; i += 4 * L) {
        take(s0, row, i);
        take(s1, row, i + L);
        take(s2, row, i + 2 * L);
        take(s3, row, i + 3 * L);
      }
      if (i + L <= n) take(s0, row, i);
      if (i + 2 * L <= n) take(s1, row, i + L);
      if (i + 3 * L <= n) take(s2, row, i + 2 * L);
      if (rest == 0) continue;
      auto const last = terms_.at(row, n - L);
      add(s3, {keep_last<A, L>(last[0], rest), keep_last<A, L>(last[1], rest)});
    }
    return {sum_lanes<A, L>((s0[0] + s1[0]) + (s2[0] + s3[0])), sum_lanes<A, L>((s0[1] + s1[1]) + (s2[1] + s3[1]))};
  }

  Terms terms_;
};

} // namespace syncnorm::host::detail
