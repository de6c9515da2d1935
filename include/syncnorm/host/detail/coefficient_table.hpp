#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/repeat.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// From one coefficient of so many lanes to the next: whole lines of the cache, and some more, lest those of a lane share a set of it
/// where the lanes are a page of it.
template <class A>
[[nodiscard]] constexpr std::int64_t coefficient_step(std::int64_t lanes) {
  return (ceil_div(lanes, line_elements<A>) + 5) * line_elements<A>;
}

/// Numbers that so many coefficients of a channel take for tensors like `x`.
template <class A, class T>
[[nodiscard]] constexpr std::int64_t coefficient_table_size(tensor_view<T> const& x, std::size_t coefficients) {
  std::int64_t const lanes = x.channels * (table_folds(x) ? x.spatial : 1);
  return static_cast<std::int64_t>(coefficients) * coefficient_step<A>(lanes + chunk_channels<A> + line_elements<T>);
}

/// Coefficient j of lane i at table[j·coefficient_step(period) + i]. Those of a channel, `terms(channel)`, stand for `fold` lanes, and
/// those of all `lanes` are repeated up to `period`.
template <std::size_t Coefficients, class A, class Terms>
void fill_coefficients(A* table, Terms const& terms, std::int64_t lanes, std::int64_t fold, std::int64_t period) {
  constexpr int L = native_lanes<A>;
  std::int64_t const step = coefficient_step<A>(period);
  if (fold == 1) {
    for (std::int64_t c = 0; c < lanes; ++c) {
      auto const values = terms(c);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < Coefficients; ++j) table[static_cast<std::int64_t>(j) * step + c] = values[j];
    }
  } else {
    for (std::int64_t c = 0, lane = 0; lane < lanes; ++c, lane += fold) {
      auto const values = terms(c);
      for (std::size_t j = 0; j < Coefficients; ++j) {
        A* const of = table + static_cast<std::int64_t>(j) * step;
        // A vector may go on into the lanes of the next channels, which come later.
        for (std::int64_t i = lane; i < lane + fold; i += L) {
          if (i + L <= lanes)
            store<L>(of + i, splat<A, L>(values[j]));
          else
            std::fill_n(of + i, lane + fold - i, values[j]);
        }
      }
    }
  }
  for (std::size_t j = 0; j < Coefficients; ++j) {
    A* const of = table + static_cast<std::int64_t>(j) * step;
    repeat(of, lanes, period);
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
