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
#include <syncnorm/host/detail/strided_rows.hpp>
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

/// The mean of the first elements of a piece at `x` that count, up to a vector, or the first of fewer; of one at least.
template <class E, class A = accumulate_t<E>>
[[nodiscard]] A masked_pilot(E const* x, prepared_mask const& mask, groups::piece const& piece) {
  constexpr std::int64_t lanes = native_lanes<A>;
  std::array<A, static_cast<std::size_t>(lanes)> first{};
  std::int64_t const n = std::min<std::int64_t>(mask.at(piece).counted, lanes);
  std::uint8_t const* const bytes = mask.row(piece.sample) + piece.begin;
  for (std::int64_t s = 0, found = 0; found < n; ++s)
    if (bytes[s] != 0) first[static_cast<std::size_t>(found++)] = load<1>(x + s);
  return pilot_mean(first.data(), n);
}

/// Moments of the elements that count of a few channels, row piece by row piece; see moment_rows.
template <class T>
class masked_moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;
  static constexpr std::size_t sum_count = moment_rows<T>::sum_count;

  using copies_type = copied_rows<T, 1>;

  /// `x` and `copies` as of moment_rows.
  masked_moment_rows(tensor_view<T const> const& x, masked_groups const& parts, copies_type* copies = nullptr)
      : x_{x}, parts_{parts}, copies_{copies} {}

  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) begun_[i] = false;
    auto const& counted = parts_.mask.at(now);
    if (counted.counted == 0) return;
    auto const add_row = [&](auto const* x) {
      auto const add_to = [&](pivoted_sums<A>& sums) {
        add_counted(sums, x, now, lookahead(x_, c, now, later), later.level);
      };
      begun_[i] ? add_to(sums_[i]) : begin_sums(sums_[i], masked_pilot(x, parts_.mask, now), counted.counted, add_to);
    };
    copies_ == nullptr ? add_row(&x_(now.sample, c, now.begin)) : add_row((*copies_)({x_}, c, now)[0]);
    begun_[i] = true;
  }

  void finish(std::int64_t group, sums_of_channels<sum_count> const& to) const {
    bool const any = parts_.elements(group) != 0;
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      to[0][c] = to[1][c] = 0;
      if (any)
        finish_group(sums_[static_cast<std::size_t>(c)], parts_, group, to[0][c], to[1][c],
                     [&](pivoted_sums<A>& sums, groups::piece const& piece) {
                       auto const add_row = [&](auto const* x) { add_counted(sums, x, piece, 0, 0); };
                       copies_ == nullptr ? add_row(&x_(piece.sample, c, piece.begin))
                                          : add_row(copies_->one({x_}, c, piece)[0]);
                     });
    }
  }

  static void merge(std::int64_t before, std::int64_t more, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    moment_rows<T>::merge(before, more, to, from, length);
  }

private:
  /// Adds what counts of a piece, which begins at `x`.
  template <class E>
  void add_counted(pivoted_sums<A>& sums, E const* x, groups::piece const& piece, std::int64_t ahead, int fetch) const {
    auto const& counted = parts_.mask.at(piece);
    std::int64_t const begin = counted.first, length = counted.last - begin;
    if (counted.contiguous())
      sums.add(x + begin, length, ahead, fetch);
    else
      sums.add(x + begin, length, ahead, fetch, by_mask<E>{parts_.mask.row(piece.sample) + piece.begin + begin});
  }

  tensor_view<T const> x_;
  masked_groups parts_;
  copies_type* copies_;
  std::array<pivoted_sums<A>, static_cast<std::size_t>(channels_at_once)> sums_;
  std::array<bool, static_cast<std::size_t>(channels_at_once)> begun_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
