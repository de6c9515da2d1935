#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// The mean of the first elements that count, up to a vector of the `counted`, or the first of fewer.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] inline A pilot_mean_of_counted(T const* x, std::uint8_t const* mask, std::int64_t counted) {
  constexpr int lanes = native_lanes<A>;
  std::array<A, static_cast<std::size_t>(lanes)> first{};
  std::int64_t const n = std::min<std::int64_t>(counted, lanes);
  for (std::int64_t i = 0, found = 0; found < n; ++i)
    if (mask[i] != 0) first[static_cast<std::size_t>(found++)] = load<1>(x + i);
  return pilot_mean(first.data(), n);
}

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

/// Moments of the elements that count of a few channels, row piece by row piece; see moment_rows.
template <class T>
class masked_moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;

  /// `x`: up to channels_at_once channels.
  masked_moment_rows(tensor_view<T const> const& x, masked_groups const& parts, layout of)
      : x_{x}, parts_{parts}, contiguous_{of == layout::rows} {}

  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) begun_[i] = false;
    auto const& counted = parts_.mask.at(now);
    if (counted.counted == 0) return;
    std::int64_t const begin = now.begin + counted.first, length = counted.last - counted.first;
    std::int64_t const ahead = lookahead(x_, c, now, later);
    int const fetch = later.level;
    if (!contiguous_)
      add_strided(c, now.sample, begin, length, counted.counted);
    else if (counted.contiguous())
      add_piece(sums_[i], &x_(now.sample, c, begin), length, ahead, fetch, begun_[i]);
    else
      add_some(sums_[i], &x_(now.sample, c, begin), parts_.mask.row(now.sample) + begin, length, counted.counted, ahead,
               fetch, begun_[i]);
    begun_[i] = true;
  }

  void finish(std::int64_t group, double* mean, double* m2) const {
    auto const count = static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      mean[c] = m2[c] = 0;
      if (count > 0) finish_moments(sums_[static_cast<std::size_t>(c)], 1 / count, mean[c], m2[c]);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    moment_rows<T>::merge(before, more, mean, m2, mean_more, m2_more, length);
  }

private:
  static void add_some(pivoted_sums<A>& sum, T const* x, std::uint8_t const* mask, std::int64_t n, std::int64_t counted,
                       std::int64_t ahead, int fetch, bool begun) {
    if (!begun) sum = pivoted_sums<A>{pilot_mean_of_counted(x, mask, counted)};
    sum.add(x, n, ahead, fetch, by_mask<T>{mask});
    if (!begun) sum.settle(counted);
  }

  [[gnu::noinline]] void add_strided(std::int64_t c, std::int64_t sample, std::int64_t begin, std::int64_t length,
                                     std::int64_t counted) {
    auto const i = static_cast<std::size_t>(c);
    std::array<A, static_cast<std::size_t>(row_cut::longest<T>)> row;
    std::uint8_t const* const mask = parts_.mask.row(sample) + begin;
    A* to = row.data();
    for (std::int64_t s = 0; s < length; ++s)
      if (mask[s] != 0) *to++ = load<1>(&x_(sample, c, begin + s));
    add_piece(sums_[i], row.data(), counted, 0, 0, begun_[i]);
  }

  tensor_view<T const> x_;
  masked_groups parts_;
  bool contiguous_;
  std::array<pivoted_sums<A>, static_cast<std::size_t>(channels_at_once)> sums_;
  std::array<bool, static_cast<std::size_t>(channels_at_once)> begun_;
};

} // namespace syncnorm::host::detail
