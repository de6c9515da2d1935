#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/column_moments.hpp>
#include <syncnorm/host/detail/masked_moment_rows.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Whether the moments of masked rows are taken by `short_row_moments`. Of longer ones the runs that count take less time by themselves.
template <class T>
[[nodiscard]] constexpr bool are_short_masked_rows(std::int64_t spatial) {
  return are_short_rows(spatial) && spatial < few_vectors<T>;
}

/// Moments of at most chunk_channels channels with short rows over `group`, of which `elements` count, at least one. `mask`: null: all.
template <class T>
void short_row_moments(tensor_view<T const> const& x, groups const& parts, prepared_mask const* mask,
                       std::int64_t group, std::int64_t elements, sums_of_channels<2> const& out) {
  using A = accumulate_t<T>;
  constexpr int lanes = native_lanes<A>;
  std::int64_t pilot_row = parts.begin(group);
  if (mask != nullptr)
    while (mask->at({pilot_row, 0, x.spatial}).counted == 0) ++pilot_row;
  std::array<A, static_cast<std::size_t>(chunk_channels<A>)> pivots;
  for (std::int64_t c = 0; c < x.channels; ++c) {
    A& pivot = pivots[static_cast<std::size_t>(c)];
    if (mask != nullptr) {
      pivot = masked_pilot(&x(pilot_row, c, 0), *mask, {pilot_row, 0, x.spatial});
    } else {
      vector_t<A, lanes> pilot{};
      for (std::int64_t i = 0; i < short_row_pilot; i += lanes) pilot += load<lanes>(&x(pilot_row, c, i));
      pivot = sum_lanes<A, lanes>(pilot) * static_cast<A>(1.0 / static_cast<double>(short_row_pilot));
    }
  }
  auto const sum = [&](std::int64_t first, std::int64_t length) {
    short_row_sums<T, moment_terms<A>> const sums{{pivots.data() + first}, {x.channel_range(first, length)}, mask};
    sums(parts.begin(group), parts.end(group), from_channel(out, first));
  };
  sum(0, x.channels);
  auto const n = static_cast<double>(elements);
  auto const [mean, m2] = out;
  for (std::int64_t c = 0; c < x.channels; ++c) {
    A& pivot = pivots[static_cast<std::size_t>(c)];
    if (sums_cancel(mean[c], m2[c], n)) {
      pivot = static_cast<A>(static_cast<double>(pivot) + mean[c] / n);
      sum(c, 1);
    }
    finish_moments(static_cast<double>(pivot), mean[c], m2[c], 1 / n, mean[c], m2[c]);
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
