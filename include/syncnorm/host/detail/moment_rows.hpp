#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/channel_moments.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Which differences of `pivoted_sums` are added: all of them.
struct all_count {
  template <int L, class V>
  [[nodiscard, gnu::always_inline]] V keep(V const& d, std::int64_t) const {
    return d;
  }
  template <int L, class V>
  [[nodiscard, gnu::always_inline]] std::array<V, 2> keep_pair(V const& d0, V const& d1, std::int64_t) const {
    return {d0, d1};
  }
};

/// Σ (x − pivot) and Σ (x − pivot)² of some channel's pieces, in one number per lane: pieces are added up without adding
/// up lanes.
template <class A>
struct pivoted_sums {
  static constexpr int lanes = native_lanes<A>;
  using doubles = vector_t<double, native_lanes<double>>;

  A pivot;
  doubles first, second;

  /// Of nothing yet. An array of them that is not all used is not to be written.
  pivoted_sums() = default;
  explicit pivoted_sums(A about) : pivot{about}, first{}, second{} {}

  template <class T, class Counted = all_count>
  void add(T const* x, std::int64_t n, std::int64_t ahead, int fetch, Counted const& counted = {}) {
    using vector = vector_t<A, lanes>;
    if (n < lanes) {
      A a = 0, b = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        A const d = counted.template keep<1>(load<1>(x + i) - pivot, i);
        a += d;
        b = multiply_add(d, d, b);
      }
      first += in_first_lane(static_cast<double>(a));
      second += in_first_lane(static_cast<double>(b));
      return;
    }
    struct sums {
      vector first{}, second{};
      void add(vector const& d) {
        first += d;
        second = multiply_add(d, d, second);
      }
    } s0, s1, s2, s3;
    vector const p = splat<A, lanes>(pivot);
    std::int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      prefetch_for<4 * lanes>(fetch, x, i + ahead);
      auto const [v0, v1] = load_pair<lanes>(x + i);
      auto const [v2, v3] = load_pair<lanes>(x + i + 2 * lanes);
      auto const [d0, d1] = counted.template keep_pair<lanes>(v0 - p, v1 - p, i);
      auto const [d2, d3] = counted.template keep_pair<lanes>(v2 - p, v3 - p, i + 2 * lanes);
      s0.add(d0);
      s1.add(d1);
      s2.add(d2);
      s3.add(d3);
    }
    auto const at = [&](std::int64_t j) { return counted.template keep<lanes>(load<lanes>(x + j) - p, j); };
    if (i < n) prefetch_for<4 * lanes>(fetch, x, i + ahead);
    for (; i + lanes <= n; i += lanes) s0.add(at(i));
    if (i < n) s1.add(keep_last<A, lanes>(at(n - lanes), static_cast<int>(n - i)));
    first += fold_to_double<A>((s0.first + s1.first) + (s2.first + s3.first));
    second += fold_to_double<A>((s0.second + s1.second) + (s2.second + s3.second));
  }

  /// Goes over to another pivot after `n` elements.
  void move_to(A other, double n) {
    double const t = static_cast<double>(pivot) - static_cast<double>(other),
                 sum = sum_lanes<double, native_lanes<double>>(first);
    double const squares = sum_lanes<double, native_lanes<double>>(second);
    pivot = other;
    first = in_first_lane(multiply_add(n, t, sum));
    second = in_first_lane(multiply_add(t, multiply_add(n, t, 2 * sum), squares));
  }

  /// Takes the mean of the `n` elements so far for the pivot, if they are a long piece.
  void settle(std::int64_t n) {
    if (n < groups::long_piece) return;
    double const count = static_cast<double>(n), sum = sum_lanes<double, native_lanes<double>>(first);
    move_to(static_cast<A>(static_cast<double>(pivot) + sum / count), count);
  }
};

/// The mean of a vector at the beginning, or the first of fewer elements.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] inline A pilot_mean(T const* x, std::int64_t n) {
  constexpr int lanes = native_lanes<A>;
  return n < lanes ? load<1>(x) : sum_lanes<A, lanes>(load<lanes>(x)) * static_cast<A>(1.0 / lanes);
}

/// Adds a piece of `n` elements, not the first one if it has `begun`. The pivot is the mean of the first piece, or of a vector
/// of a short one.
template <class A, class T>
inline void add_piece(pivoted_sums<A>& sum, T const* x, std::int64_t n, std::int64_t ahead, int fetch, bool begun) {
  if (!begun) sum = pivoted_sums<A>{pilot_mean(x, n)};
  sum.add(x, n, ahead, fetch);
  if (!begun) sum.settle(n);
}

/// m2 and mean from Σ (x − pivot) and Σ (x − pivot)².
inline void finish_moments(double pivot, double first, double second, double inverse, double& mean, double& m2) {
  mean = multiply_add(first, inverse, pivot);
  // A NaN stays one: max returns its first argument unless that is the smaller.
  m2 = std::max(multiply_add(-first * inverse, first, second), 0.0);
}
template <class A>
inline void finish_moments(pivoted_sums<A> const& sum, double inverse, double& mean, double& m2) {
  finish_moments(static_cast<double>(sum.pivot), sum_lanes<double, native_lanes<double>>(sum.first),
                 sum_lanes<double, native_lanes<double>>(sum.second), inverse, mean, m2);
}

/// Moments of a few channels, row piece by row piece; the sums of a group of pieces at a time.
///
/// They are sums about one pivot per channel and group: they cancel only as far as that is far from the mean, and it is the
/// mean of the first piece, or of a vector of a short one, so that the loss is bounded by the spread that these elements
/// themselves cause.
template <class T>
class moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;

  /// `x`: up to channels_at_once channels.
  moment_rows(tensor_view<T const> const& x, groups const& parts, layout of)
      : x_{x}, parts_{parts}, contiguous_{of == layout::rows} {}

  /// Adds a piece of channel `c`, and fetches what is read later; `begun`: not the first of its group.
  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto& sum = sums_[static_cast<std::size_t>(c)];
    if (contiguous_)
      add_piece(sum, &x_(now.sample, c, now.begin), now.length, lookahead(x_, c, now, later), later.level, begun);
    else
      add_strided(sum, c, now, begun);
  }

  /// The moments of all channels over the group that was added.
  void finish(std::int64_t group, double* mean, double* m2) const {
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < x_.channels; ++c)
      finish_moments(sums_[static_cast<std::size_t>(c)], inverse, mean[c], m2[c]);
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    auto const channels = static_cast<std::size_t>(length);
    merge_channels(before, {mean, channels}, {m2, channels}, more, {mean_more, channels}, {m2_more, channels});
  }

private:
  [[gnu::noinline]] void add_strided(pivoted_sums<A>& sum, std::int64_t c, groups::piece const& piece, bool begun) {
    std::array<A, static_cast<std::size_t>(row_cut::longest<T>)> row{};
    for (std::int64_t s = 0; s < piece.length; ++s)
      row[static_cast<std::size_t>(s)] = load<1>(&x_(piece.sample, c, piece.begin + s));
    add_piece(sum, row.data(), piece.length, 0, 0, begun);
  }

  tensor_view<T const> x_;
  groups parts_;
  bool contiguous_;
  std::array<pivoted_sums<A>, channels_at_once> sums_;
};

} // namespace syncnorm::host::detail
