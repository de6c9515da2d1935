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
#include <syncnorm/host/detail/strided_rows.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

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

/// m2 and mean from Σ (x − pivot) and Σ (x − pivot)².
inline void finish_moments(double pivot, double first, double second, double inverse, double& mean, double& m2) {
  mean = multiply_add(first, inverse, pivot);
  // A NaN stays one: max returns its first argument unless that is the smaller.
  m2 = std::max(multiply_add(-first * inverse, first, second), 0.0);
}

/// Whether the squares of n differences from a pivot are little but what it is off by, which m2 does without: then what rounding takes
/// off them may be too much of m2, and they had better be summed about the mean.
[[nodiscard]] inline bool sums_cancel(double first, double second, double n) {
  return 4 * first * first > 3 * n * second;
}

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
    add_vectors(x, n, ahead, fetch, counted, [](std::int64_t) {});
  }

  /// `n` elements, at least a vector's; between(i) after each four vectors.
  template <class T, class Counted, class Between>
  [[gnu::always_inline]] void add_vectors(T const* x, std::int64_t n, std::int64_t ahead, int fetch,
                                          Counted const& counted, Between const& between) {
    vector const p = splat<A, lanes>(pivot);
    for (std::int64_t i = 0; i < n;) {
      partial_sums some;
      std::int64_t const end = std::min(n, i + stretch);
      for (; i + 4 * lanes <= end; i += 4 * lanes) {
        prefetch_for<4 * lanes>(fetch, x, i + ahead);
        some.add_four(x, i, p, counted);
        between(i);
      }
      if (i < end) prefetch_for<4 * lanes>(fetch, x, i + ahead);
      some.add_last(x, i, end, p, counted);
      i = end;
      add(some);
    }
  }

  /// Adds `n` elements, at least a vector's, to each of two sums, which are read side by side and fetched so many elements ahead; of both
  /// between.pair(i) after each two vectors, or, where these are less than a line of the cache, between(i) after each four.
  template <class T, class Between>
  [[gnu::always_inline]] static void add_two(std::int64_t n, std::int64_t ahead, pivoted_sums& a, T const* x,
                                             Between const& between_x, pivoted_sums& b, T const* y,
                                             Between const& between_y) {
    vector const p = splat<A, lanes>(a.pivot), q = splat<A, lanes>(b.pivot);
    all_count const all;
    constexpr bool pairs = 2 * lanes >= line_elements<T>;
    for (std::int64_t i = 0; i < n;) {
      partial_sums of_x, of_y;
      std::int64_t const end = std::min(n, i + stretch);
      for (; i + 4 * lanes <= end; i += 4 * lanes) {
#pragma GCC unroll 2
        for (std::size_t to = 0; to < 4; to += 2) {
          std::int64_t const at = i + static_cast<std::int64_t>(to) * lanes;
          prefetch<2 * lanes, 1>(x, at + ahead);
          of_x.add_pair(to, x, at, p, all);
          prefetch<2 * lanes, 1>(y, at + ahead);
          of_y.add_pair(to, y, at, q, all);
          if constexpr (pairs) {
            between_x.pair(at);
            between_y.pair(at);
          }
        }
        if constexpr (!pairs) {
          between_x(i);
          between_y(i);
        }
      }
      of_x.add_last(x, i, end, p, all);
      of_y.add_last(y, i, end, q, all);
      i = end;
      a.add(of_x);
      b.add(of_y);
    }
  }

  /// The mean, and Σ (x − mean)², of the `n` elements so far.
  void finish(double n, double& mean, double& m2) const {
    finish_moments(static_cast<double>(pivot), sum(), squares(), 1 / n, mean, m2);
  }

  [[nodiscard]] bool cancel(double n) const { return sums_cancel(sum(), squares(), n); }
  [[nodiscard]] A mean(double n) const { return static_cast<A>(static_cast<double>(pivot) + sum() / n); }

  /// Goes over to another pivot after `n` elements.
  void move_to(A other, double n) {
    double const t = static_cast<double>(pivot) - static_cast<double>(other), of_all = sum(), of_squares = squares();
    pivot = other;
    first = in_first_lane(multiply_add(n, t, of_all));
    second = in_first_lane(multiply_add(t, multiply_add(n, t, 2 * of_all), of_squares));
  }

private:
  using vector = vector_t<A, lanes>;
  static constexpr std::int64_t stretch = longest_sum * 4 * lanes;

  struct sums_of_vectors {
    vector first{}, second{};
    void add(vector const& d) {
      first += d;
      second = multiply_add(d, d, second);
    }
  };

  /// Of at most a stretch of elements, about the pivots `p`.
  struct partial_sums {
    std::array<sums_of_vectors, 4> of{};

    /// Two vectors, to the sums `to` and the next.
    template <class T, class Counted>
    [[gnu::always_inline]] void add_pair(std::size_t to, T const* x, std::int64_t i, vector const& p,
                                         Counted const& counted) {
      auto const [v0, v1] = load_pair<lanes>(x + i);
      auto const [d0, d1] = counted.template keep_pair<lanes>(v0 - p, v1 - p, i);
      of[to].add(d0);
      of[to + 1].add(d1);
    }

    template <class T, class Counted>
    [[gnu::always_inline]] void add_four(T const* x, std::int64_t i, vector const& p, Counted const& counted) {
      add_pair(0, x, i, p, counted);
      add_pair(2, x, i + 2 * lanes, p, counted);
    }

    /// Elements [i, end), less than four vectors; a vector's are there before `end`.
    template <class T, class Counted>
    [[gnu::always_inline]] void add_last(T const* x, std::int64_t i, std::int64_t end, vector const& p,
                                         Counted const& counted) {
      auto const at = [&](std::int64_t j) { return counted.template keep<lanes>(load<lanes>(x + j) - p, j); };
      for (; i + lanes <= end; i += lanes) of[0].add(at(i));
      if (i < end) of[1].add(keep_last<A, lanes>(at(end - lanes), static_cast<int>(end - i)));
    }
  };

  [[gnu::always_inline]] void add(partial_sums const& some) {
    auto const& [s0, s1, s2, s3] = some.of;
    first += fold_to_double<A>((s0.first + s1.first) + (s2.first + s3.first));
    second += fold_to_double<A>((s0.second + s1.second) + (s2.second + s3.second));
  }

  [[nodiscard]] double sum() const { return sum_lanes<double, native_lanes<double>>(first); }
  [[nodiscard]] double squares() const { return sum_lanes<double, native_lanes<double>>(second); }
};

/// The sums of a channel's first piece, of `n` elements that count, which are about a pilot: about its mean, if it is a long piece.
/// add(sums) adds it.
template <class A, class Add>
void settle_pivot(pivoted_sums<A>& sums, std::int64_t n, Add const& add) {
  if (n < groups::long_piece) return;
  auto const count = static_cast<double>(n);
  A const mean = sums.mean(count);
  if (sums.cancel(count)) {
    sums = pivoted_sums<A>{mean};
    add(sums);
  }
  sums.move_to(sums.mean(count), count);
}

/// The same sums, made about `pilot`.
template <class A, class Add>
void begin_sums(pivoted_sums<A>& sums, A pilot, std::int64_t n, Add const& add) {
  sums = pivoted_sums<A>{pilot};
  add(sums);
  settle_pivot(sums, n, add);
}

/// The moments of a channel over group `g` from its sums, which are made again about the mean where they cancel; add(sums, piece) adds
/// a piece.
template <class A, class Parts, class Add>
void finish_group(pivoted_sums<A> const& sums, Parts const& parts, std::int64_t g, double& mean, double& m2,
                  Add const& add) {
  auto const n = static_cast<double>(parts.elements(g));
  if (!sums.cancel(n)) return sums.finish(n, mean, m2);
  pivoted_sums<A> about_mean{sums.mean(n)};
  parts.for_each_piece(g, [&](groups::piece const& piece) { add(about_mean, piece); });
  about_mean.finish(n, mean, m2);
}

/// The mean of a vector at the beginning, or the first of fewer elements.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] inline A pilot_mean(T const* x, std::int64_t n) {
  constexpr int lanes = native_lanes<A>;
  return n < lanes ? load<1>(x) : sum_lanes<A, lanes>(load<lanes>(x)) * static_cast<A>(1.0 / lanes);
}

/// Moments of a few channels, row piece by row piece; the sums of a group of pieces at a time.
///
/// They are sums about one pivot per channel and group: the mean of the first piece, or of a vector of a short one, or where that is
/// so far from the mean that they cancel, the mean, for which the group is read again.
template <class T>
class moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;
  /// Whether `sum_two_interleaved` is worth while, as registers suffice for two.
  static constexpr bool reads_side_by_side = true;
  static constexpr std::size_t sum_count = 2; ///< means and m2

  using copies_type = copied_rows<T, 1>;

  /// `x`: up to channels_at_once channels; `copies`: null where rows are contiguous, else those of this `x`.
  moment_rows(tensor_view<T const> const& x, groups const& parts, copies_type* copies = nullptr)
      : x_{x}, parts_{parts}, copies_{copies} {}

  /// Adds a piece of channel `c`, and fetches what is read later; `begun`: not the first of its group.
  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto& sums = sums_[static_cast<std::size_t>(c)];
    std::int64_t const ahead = lookahead(x_, c, now, later);
    int const fetch = later.level;
    auto const add_row = [&](auto const* x) {
      auto const add_to = [&](pivoted_sums<A>& to) { to.add(x, now.length, ahead, fetch); };
      begun ? add_to(sums) : begin_sums(sums, pilot_mean(x, now.length), now.length, add_to);
    };
    copies_ == nullptr ? add_row(&x_(now.sample, c, now.begin)) : add_row((*copies_)({x_}, c, now)[0]);
  }

  /// Where rows are contiguous, and all positions count: all of group `g` of channel `c`, in pieces of a vector's elements at least;
  /// `between` is an `elementwise_run::interleaved`, of the same pieces of another channel.
  template <class Between>
  [[gnu::noinline]] void add_interleaved(std::int64_t c, groups const& parts, std::int64_t g, Between const& between) {
    tensor_view<T const> const x = x_; // a copy, which stays in registers
    pivoted_sums<A> sums;
    bool begun = false;
    for_each_piece_of_channel<T>(
        parts, g, c,
        x.channels, [&](groups::piece const& now, later_piece const& later) __attribute__((always_inline)) {
          T const* const from = &x(now.sample, c, now.begin);
          if (!begun) sums = pivoted_sums<A>{pilot_mean(from, now.length)};
          Between here = between; // a copy, which stays in registers
          here.move_to(now.sample, now.begin, now.length);
          sums.add_vectors(from, now.length, later.distance(x, now), 1, all_count{}, here);
          here.finish(now.length);
          if (!begun) settle_pivot(sums, now.length, [&](pivoted_sums<A>& to) { to.add(from, now.length, 0, 0); });
          begun = true;
        });
    sums_[static_cast<std::size_t>(c)] = sums;
  }

  /// The same of group `g`, which `matches_next`, to `first`, and of the one after it to `second`: they are read side by side.
  template <class Between>
  [[gnu::noinline]] void sum_two_interleaved(std::int64_t c, groups const& parts, std::int64_t g,
                                             Between const& between, sums_of_channels<sum_count> const& first,
                                             sums_of_channels<sum_count> const& second) const {
    tensor_view<T const> const x = x_; // a copy, which stays in registers
    pivoted_sums<A> of_first{A{}}, of_second{A{}};
    bool begun = false;
    parts.for_each_two_pieces(
        g, [&](groups::piece const& now, groups::piece const& then) __attribute__((always_inline)) {
          T const *const from = &x(now.sample, c, now.begin), *const other = &x(then.sample, c, then.begin);
          if (!begun) {
            of_first = pivoted_sums<A>{pilot_mean(from, now.length)};
            of_second = pivoted_sums<A>{pilot_mean(other, now.length)};
          }
          Between here = between, there = between; // copies, which stay in registers
          here.move_to(now.sample, now.begin, now.length);
          there.move_to(then.sample, then.begin, now.length);
          pivoted_sums<A>::add_two(now.length, elements_ahead_of_two<T>, of_first, from, here, of_second, other, there);
          here.finish(now.length);
          there.finish(now.length);
          if (!begun) {
            settle_pivot(of_first, now.length, [&](pivoted_sums<A>& to) { to.add(from, now.length, 0, 0); });
            settle_pivot(of_second, now.length, [&](pivoted_sums<A>& to) { to.add(other, now.length, 0, 0); });
          }
          begun = true;
        });
    put(of_first, c, g, first);
    put(of_second, c, g + 1, second);
  }

  /// The moments of all channels over the group that was added.
  void finish(std::int64_t group, sums_of_channels<sum_count> const& to) const {
    for (std::int64_t c = 0; c < x_.channels; ++c) put(sums_[static_cast<std::size_t>(c)], c, group, to);
  }

  static void merge(std::int64_t before, std::int64_t more, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    auto const channels = static_cast<std::size_t>(length);
    merge_channels(before, {to[0], channels}, {to[1], channels}, more, {from[0], channels}, {from[1], channels});
  }

private:
  void put(pivoted_sums<A> const& of, std::int64_t c, std::int64_t group, sums_of_channels<sum_count> const& to) const {
    finish_group(of, parts_, group, to[0][c], to[1][c], [&](pivoted_sums<A>& sums, groups::piece const& piece) {
      auto const add_row = [&](auto const* x) { sums.add(x, piece.length, 0, 0); };
      copies_ == nullptr ? add_row(&x_(piece.sample, c, piece.begin)) : add_row(copies_->one({x_}, c, piece)[0]);
    });
  }

  tensor_view<T const> x_;
  groups parts_;
  copies_type* copies_;
  std::array<pivoted_sums<A>, channels_at_once> sums_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
