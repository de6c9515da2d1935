#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/columns.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// x − pivot, to be summed and squared.
template <class A>
struct moment_terms {
  static constexpr std::size_t inputs = 1, coefficients = 1, values = 2;
  A const* pivots;

  std::array<A, coefficients> operator()(std::int64_t c) const { return {pivots[c]}; }

  template <class V>
  [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                           std::array<V, coefficients> const& k) const {
    V const d = in[0] - k[0];
    return {d, d};
  }
};

/// The means of the columns of a few rows, about which those of a run are summed.
template <int L, class T, class A = accumulate_t<T>>
void pilot_means(column_run<T, 1> const& run, column_values<A>& means) {
  constexpr std::size_t most = 8;
  std::size_t const rows = std::min(run.count, most);
  A const share = 1 / static_cast<A>(rows);
  for (std::int64_t k = 0; k < run.parts; ++k) {
    for_each_vector<L>(0, run.width, [&](std::int64_t, std::int64_t c) {
      std::int64_t const at = k * run.step[0] + c;
      auto const base = load<L>(run.rows[0][0] + at);
      vector_t<A, L> sum{};
      for (std::size_t r = 1; r < rows; ++r) sum += load<L>(run.rows[r][0] + at) - base;
      store<L>(means.data() + k * run.width + c, base + sum * share);
    });
  }
}

/// Makes pivots about which sums cancel the means. Whether there are such.
template <class T, class A>
[[nodiscard]] bool settle(column_run<T, 1> const& run, std::int64_t channels, column_sums<A, 2> const& sums,
                          column_values<A>& pivots) {
  double const n = static_cast<double>(run.count);
  bool any = false;
  run.for_each_piece(channels, [&](auto const& piece) {
    A const* const a = sums[0].data() + piece.sums;
    A const* const b = sums[1].data() + piece.sums;
    A* const about = pivots.data() + piece.column;
    for (std::int64_t i = 0; i < piece.count; ++i) {
      double const sum = static_cast<double>(a[i]);
      if (!sums_cancel(sum, static_cast<double>(b[i]), n)) continue;
      about[i] = static_cast<A>(static_cast<double>(about[i]) + sum / n);
      any = true;
    }
  });
  return any;
}

/// Moments of contiguous channels over group `g`, `elements` positions, not none. `mask`: of the positions that count; null: all.
template <class T>
void column_moments(tensor_view<T const> const& x, groups const& parts, prepared_mask const* mask, std::int64_t g,
                    std::int64_t elements, sums_of_channels<2> const& out) {
  using A = accumulate_t<T>;
  constexpr int lanes = native_lanes<A>;
  column_runs<T, 1> const runs{{x}, parts, mask};
  std::array<column_values<A>, 1> pivots;
  column_sums<A, 2> sums;
  column_values<double> pivot, first, second; // of the group
  bool begun = false;
  runs.for_each(g, [&](column_run<T, 1> const& run) {
    run.width < lanes ? pilot_means<1>(run, pivots[0]) : pilot_means<lanes>(run, pivots[0]);
    sum_columns<T>(moment_terms<A>{}, run, pivots, sums);
    double const n = static_cast<double>(run.count);
    if (settle(run, x.channels, sums, pivots[0])) sum_columns<T>(moment_terms<A>{}, run, pivots, sums);
    run.for_each_piece(x.channels, [&](auto const& piece) {
      A const* const about = pivots[0].data() + piece.column;
      A const* const a = sums[0].data() + piece.sums;
      A const* const b = sums[1].data() + piece.sums;
      double *const to = pivot.data() + piece.channel, *const sum = first.data() + piece.channel,
                    *const squares = second.data() + piece.channel;
      if (!begun && piece.column == piece.channel) {
        for (std::int64_t i = 0; i < piece.count; ++i) {
          to[i] = static_cast<double>(about[i]) + static_cast<double>(a[i]) / n;
          sum[i] = squares[i] = 0;
        }
      }
      for (std::int64_t i = 0; i < piece.count; ++i) {
        double const t = static_cast<double>(about[i]) - to[i], of_run = static_cast<double>(a[i]);
        sum[i] += multiply_add(n, t, of_run);
        squares[i] += multiply_add(t, multiply_add(n, t, 2 * of_run), static_cast<double>(b[i]));
      }
    });
    begun = true;
  });
  double const inverse = 1 / static_cast<double>(elements);
  for (std::int64_t c = 0; c < x.channels; ++c) {
    auto const i = static_cast<std::size_t>(c);
    finish_moments(pivot[i], first[i], second[i], inverse, out[0][c], out[1][c]);
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
