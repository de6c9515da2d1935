#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/channel_moments.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>

namespace syncnorm::detail {

/// Folds the values of the ranks into `rows`, which are zeros at first; mean and m2 under `merge_rule::moments`. In rank order, so that
/// every rank gets the same bits. `count_of(rank)`: elements of a channel there; `row_of(rank, v)`: its row v.
template <class Count, class Row>
void fold_ranks(merge_rule rule, std::size_t ranks, Count const& count_of, Row const& row_of,
                std::span<std::span<double> const> rows) {
  std::int64_t before = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (rule == merge_rule::moments) {
      std::int64_t const count = count_of(r);
      merge_channels(before, rows[0], rows[1], count, row_of(r, 0), row_of(r, 1));
      before += count;
      continue;
    }
    for (std::size_t v = 0; v < rows.size(); ++v) {
      std::span<double const> const row = row_of(r, v);
      for (std::size_t c = 0; c < row.size(); ++c) rows[v][c] += row[c];
    }
  }
}

} // namespace syncnorm::detail
