#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// The differences of elements that count, and 0 of others, which may be anything, no numbers, too.
template <class T>
struct by_mask {
  using A = accumulate_t<T>;
  std::uint8_t const* mask;

  template <int L>
  [[nodiscard, gnu::always_inline]] vector_t<A, L> keep(vector_t<A, L> const& d, std::int64_t i) const {
    vector_t<A, L> const zero{};
    return counted_lanes<A, L>(mask + i) ? d : zero;
  }
  template <int L>
  [[nodiscard, gnu::always_inline]] std::array<vector_t<A, L>, 2>
  keep_pair(vector_t<A, L> const& d0, vector_t<A, L> const& d1, std::int64_t i) const {
    vector_t<A, L> const zero{};
    auto const counted = counted_pair<T, L>(mask + i);
    return {counted[0] ? d0 : zero, counted[1] ? d1 : zero};
  }
};

/// The mean of the first elements of a piece that count, up to a vector, or the first of fewer; of one at least.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] A masked_pilot(tensor_view<T const> const& x, prepared_mask const& mask, std::int64_t c,
                             groups::piece const& piece) {
  constexpr std::int64_t lanes = native_lanes<A>;
  std::array<A, static_cast<std::size_t>(lanes)> first{};
  std::int64_t const n = std::min<std::int64_t>(mask.at(piece).counted, lanes);
  std::uint8_t const* const bytes = mask.row(piece.sample);
  for (std::int64_t s = piece.begin, found = 0; found < n; ++s)
    if (bytes[s] != 0) first[static_cast<std::size_t>(found++)] = load<1>(&x(piece.sample, c, s));
  return pilot_mean(first.data(), n);
}

/// Moments of the elements that count of a few channels, row piece by row piece; see moment_rows.
template <class T>
class masked_moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;
  static constexpr std::size_t sum_count = moment_rows<T>::sum_count;

  /// `x`: up to channels_at_once channels.
  masked_moment_rows(tensor_view<T const> const& x, masked_groups const& parts, layout of)
      : x_{x}, parts_{parts}, contiguous_{of == layout::rows} {}

  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) begun_[i] = false;
    auto const& counted = parts_.mask.at(now);
    if (counted.counted == 0) return;
    auto const add_to = [&](pivoted_sums<A>& sums) {
      add_elements(sums, c, now, lookahead(x_, c, now, later), later.level);
    };
    begun_[i] ? add_to(sums_[i]) : begin_sums(sums_[i], masked_pilot(x_, parts_.mask, c, now), counted.counted, add_to);
    begun_[i] = true;
  }

  void finish(std::int64_t group, sums_of_channels<sum_count> const& to) const {
    bool const any = parts_.elements(group) != 0;
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      to[0][c] = to[1][c] = 0;
      if (any)
        finish_group(sums_[static_cast<std::size_t>(c)], parts_, group, to[0][c], to[1][c],
                     [&](pivoted_sums<A>& sums, groups::piece const& piece) { add_elements(sums, c, piece, 0, 0); });
    }
  }

  static void merge(std::int64_t before, std::int64_t more, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    moment_rows<T>::merge(before, more, to, from, length);
  }

private:
  void add_elements(pivoted_sums<A>& sums, std::int64_t c, groups::piece const& piece, std::int64_t ahead,
                    int fetch) const {
    auto const& counted = parts_.mask.at(piece);
    std::int64_t const begin = piece.begin + counted.first, length = counted.last - counted.first;
    if (!contiguous_)
      add_copies(sums, c, piece.sample, begin, length);
    else if (counted.contiguous())
      sums.add(&x_(piece.sample, c, begin), length, ahead, fetch);
    else
      sums.add(&x_(piece.sample, c, begin), length, ahead, fetch, by_mask<T>{parts_.mask.row(piece.sample) + begin});
  }

  [[gnu::noinline]] void add_copies(pivoted_sums<A>& sums, std::int64_t c, std::int64_t sample, std::int64_t begin,
                                    std::int64_t length) const {
    std::array<A, static_cast<std::size_t>(row_cut::longest<T>)> row;
    std::uint8_t const* const mask = parts_.mask.row(sample) + begin;
    A* to = row.data();
    for (std::int64_t s = 0; s < length; ++s)
      if (mask[s] != 0) *to++ = load<1>(&x_(sample, c, begin + s));
    sums.add(static_cast<A const*>(row.data()), to - row.data(), 0, 0);
  }

  tensor_view<T const> x_;
  masked_groups parts_;
  bool contiguous_;
  std::array<pivoted_sums<A>, static_cast<std::size_t>(channels_at_once)> sums_;
  std::array<bool, static_cast<std::size_t>(channels_at_once)> begun_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
