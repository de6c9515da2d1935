#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Σ (x − pivot) and Σ (x − pivot)² of some channel's pieces, in one number per lane: pieces are added up without adding
/// up lanes.
template <class A>
struct pivoted_sums {
  static constexpr int lanes = native_lanes<A>;

  A pivot;
  vector_t<double, native_lanes<double>> first{}, second{};

  template <class T>
  void add(T const* x, std::int64_t n, std::int64_t ahead) {
    using vector = vector_t<A, lanes>;
    if (n < lanes) {
      A a = 0, b = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        A const d = load<1>(x + i) - pivot;
        a += d;
        b += d * d;
      }
      first[0] += static_cast<double>(a);
      second[0] += static_cast<double>(b);
      return;
    }
    struct sums {
      vector first{}, second{};
      void add(vector const& d) {
        first += d;
        second += d * d;
      }
    } s0, s1, s2, s3;
    vector const p = splat<A, lanes>(pivot);
    std::int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      prefetch<4 * lanes>(x, i + ahead);
      s0.add(load<lanes>(x + i) - p);
      s1.add(load<lanes>(x + i + lanes) - p);
      s2.add(load<lanes>(x + i + 2 * lanes) - p);
      s3.add(load<lanes>(x + i + 3 * lanes) - p);
    }
    if (i < n) prefetch<4 * lanes>(x, i + ahead);
    for (; i + lanes <= n; i += lanes) s0.add(load<lanes>(x + i) - p);
    if (i < n) s1.add(keep_last<A, lanes>(load<lanes>(x + n - lanes) - p, static_cast<int>(n - i)));
    first += fold_to_double<A>((s0.first + s1.first) + (s2.first + s3.first));
    second += fold_to_double<A>((s0.second + s1.second) + (s2.second + s3.second));
  }

  /// Goes over to another pivot after `n` elements.
  void move_to(A other, double n) {
    double const t = static_cast<double>(pivot) - static_cast<double>(other),
                 sum = sum_lanes<double, native_lanes<double>>(first);
    double const squares = sum_lanes<double, native_lanes<double>>(second);
    *this = {other};
    first[0] = sum + n * t;
    second[0] = squares + t * (2 * sum + n * t);
  }
};

/// The mean of a vector at the beginning, or the first of fewer elements.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] inline A pilot_mean(T const* x, std::int64_t n) {
  constexpr int lanes = native_lanes<A>;
  return n < lanes ? load<1>(x) : sum_lanes<A, lanes>(load<lanes>(x)) * static_cast<A>(1.0 / lanes);
}

/// Means and centred second moments of channels over one group of pieces; see reduce_channels.
template <class T>
class moments_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  /// Pieces shorter than this go element by element into double.
  static constexpr std::int64_t shortest = 8;
  /// Rows of as many channels are summed before the next sample is.
  static constexpr std::int64_t channels_at_once = 64;

public:
  moments_kernel(tensor_view<T const> const& x, groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* mean,
                                    double* m2) const {
    tensor_view<T const> const x = x_.channel_range(first, length);
    constexpr int lanes = native_lanes<A>, double_lanes = native_lanes<double>;
    if (layout_ != layout::channels) {
      rows(x, group, mean, m2);
    } else if (parts_.cut.length >= shortest) {
      length >= lanes ? channels<lanes>(x, group, mean, m2) : channels<1>(x, group, mean, m2);
    } else {
      length >= double_lanes ? elements<double_lanes>(x, group, mean, m2) : elements<1>(x, group, mean, m2);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    double const share = static_cast<double>(more) / static_cast<double>(before + more);
    double const weight = static_cast<double>(before) * share;
    for (std::int64_t c = 0; c < length; ++c) {
      double const delta = mean_more[c] - mean[c];
      mean[c] += delta * share;
      m2[c] += m2_more[c] + delta * delta * weight;
    }
  }

private:
  /// Sums about one pivot per channel and group: they cancel only as far as that is far from the mean, and it is the mean
  /// of the first piece, or of a vector of a short one, so that the loss is bounded by the spread that these elements
  /// themselves cause.
  void rows(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    std::array<pivoted_sums<A>, channels_at_once> sums;
    for (std::int64_t begin = 0; begin < x.channels; begin += channels_at_once) {
      auto const some = x.channel_range(begin, std::min<std::int64_t>(channels_at_once, x.channels - begin));
      bool begun = false;
      parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const& next) {
        if (layout_ != layout::rows) {
          for (std::int64_t c = 0; c < some.channels; ++c)
            add_strided(sums[static_cast<std::size_t>(c)], some, c, now, begun);
        } else {
          T const* row = &some(now.sample, 0, now.begin);
          std::int64_t const ahead = lookahead(some, 0, now, next), last = some.channels - 1;
          for (std::int64_t c = 0; c < last; ++c, row += some.stride_c)
            add(sums[static_cast<std::size_t>(c)], row, now.length, ahead, begun);
          add(sums[static_cast<std::size_t>(last)], row, now.length, lookahead(some, last, now, next), begun);
        }
        begun = true;
      });
      for (std::int64_t c = 0; c < some.channels; ++c) {
        auto const& sum = sums[static_cast<std::size_t>(c)];
        finish(static_cast<double>(sum.pivot), sum_lanes<double, native_lanes<double>>(sum.first),
               sum_lanes<double, native_lanes<double>>(sum.second), inverse, mean[begin + c], m2[begin + c]);
      }
    }
  }

  template <class E>
  static void add(pivoted_sums<A>& sum, E const* x, std::int64_t n, std::int64_t ahead, bool begun) {
    if (!begun) sum = {pilot_mean(x, n)};
    sum.add(x, n, ahead);
    if (begun || n < groups::long_piece) return;
    double const count = static_cast<double>(n);
    sum.move_to(
        static_cast<A>(static_cast<double>(sum.pivot) + sum_lanes<double, native_lanes<double>>(sum.first) / count),
        count);
  }

  [[gnu::noinline]] static void add_strided(pivoted_sums<A>& sum, tensor_view<T const> const& x, std::int64_t c,
                                            groups::piece const& piece, bool begun) {
    std::array<A, static_cast<std::size_t>(row_cut::longest)> row{};
    for (std::int64_t s = 0; s < piece.length; ++s)
      row[static_cast<std::size_t>(s)] = load<1>(&x(piece.sample, c, piece.begin + s));
    add(sum, row.data(), piece.length, 0, begun);
  }

  /// Long pieces: one lane per channel, four positions at a time.
  template <int L>
  void channels(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const slots{x.channels};
    std::array<A, most> pivots, firsts, seconds;
    std::array<double, most> pivot, first, second;
    bool begun = false;
    std::int64_t const ahead = positions_ahead<T>(x.channels) * x.stride_s;
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const&) {
      std::int64_t const length = now.length, pilot = std::min(length, shortest), step = x.stride_s;
      T const* const row = &x(now.sample, 0, now.begin);
      slots.for_each([&](std::int64_t slot, std::int64_t c) {
        vector sum = load<L>(row + c);
        for (std::int64_t s = 1; s < pilot; ++s) sum += load<L>(row + c + s * step);
        store<L>(&pivots[static_cast<std::size_t>(slot)], sum * static_cast<A>(1 / static_cast<double>(pilot)));
        store<L>(&firsts[static_cast<std::size_t>(slot)], vector{});
        store<L>(&seconds[static_cast<std::size_t>(slot)], vector{});
      });
      std::int64_t s = 0;
      for (; s + 4 <= length; s += 4) {
        slots.for_each([&](std::int64_t slot, std::int64_t c) {
          T const* const from = row + s * step + c;
          auto const i = static_cast<std::size_t>(slot);
          if constexpr (L > 1)
            for (int r = 0; r < 4; ++r) prefetch<L>(from, ahead + r * step);
          vector const p = load<L>(&pivots[i]);
          vector const d0 = load<L>(from) - p, d1 = load<L>(from + step) - p;
          vector const d2 = load<L>(from + 2 * step) - p, d3 = load<L>(from + 3 * step) - p;
          store<L>(&firsts[i], load<L>(&firsts[i]) + ((d0 + d1) + (d2 + d3)));
          store<L>(&seconds[i], load<L>(&seconds[i]) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)));
        });
      }
      for (; s < length; ++s) {
        slots.for_each([&](std::int64_t slot, std::int64_t c) {
          auto const i = static_cast<std::size_t>(slot);
          vector const d = load<L>(row + s * step + c) - load<L>(&pivots[i]);
          store<L>(&firsts[i], load<L>(&firsts[i]) + d);
          store<L>(&seconds[i], load<L>(&seconds[i]) + d * d);
        });
      }
      double const n = static_cast<double>(length);
      auto const used = static_cast<std::size_t>(slots.size());
      if (!begun) {
        for (std::size_t i = 0; i < used; ++i) {
          pivot[i] = static_cast<double>(pivots[i]) + static_cast<double>(firsts[i]) / n;
          first[i] = second[i] = 0;
        }
        begun = true;
      }
      for (std::size_t i = 0; i < used; ++i) {
        double const t = static_cast<double>(pivots[i]) - pivot[i], sum = static_cast<double>(firsts[i]);
        first[i] += sum + n * t;
        second[i] += static_cast<double>(seconds[i]) + t * (2 * sum + n * t);
      }
    });
    finish_slots(slots, group, pivot, first, second, mean, m2);
  }

  /// Short pieces, as in (N, C): every element goes into double, four of a channel at a time.
  template <int L>
  void elements(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    using wide = vector_t<double, L>;
    lane_slots<L> const slots{x.channels};
    std::array<A, most> pivots;
    std::array<double, most> pivot, first, second;
    std::fill_n(first.data(), slots.size(), 0.0);
    std::fill_n(second.data(), slots.size(), 0.0);
    std::array<T const*, static_cast<std::size_t>(shortest)> rows;
    std::size_t waiting = 0;
    bool begun = false;
    auto const flush = [&] {
      if (waiting == 0) return;
      if (!begun) {
        slots.for_each([&](std::int64_t slot, std::int64_t c) {
          vector sum = load<L>(rows[0] + c);
          for (std::size_t r = 1; r < waiting; ++r) sum += load<L>(rows[r] + c);
          store<L>(&pivots[static_cast<std::size_t>(slot)], sum * static_cast<A>(1 / static_cast<double>(waiting)));
        });
        begun = true;
      }
      slots.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot);
        vector const p = load<L>(&pivots[i]);
        wide a = load<L>(&first[i]), b = load<L>(&second[i]);
        for (std::size_t r = 0; r < waiting; ++r) {
          wide const d = to_double<A, L>(load<L>(rows[r] + c) - p);
          a += d;
          b += d * d;
        }
        store<L>(&first[i], a);
        store<L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const&) {
      for (std::int64_t s = 0; s < now.length; ++s) {
        rows[waiting++] = &x(now.sample, 0, now.begin + s);
        if (waiting == rows.size()) flush();
      }
    });
    flush();
    std::copy_n(pivots.data(), slots.size(), pivot.data());
    finish_slots(slots, group, pivot, first, second, mean, m2);
  }

  template <int L>
  void finish_slots(lane_slots<L> const& slots, std::int64_t group, std::array<double, most> const& pivot,
                    std::array<double, most> const& first, std::array<double, most> const& second, double* mean,
                    double* m2) const {
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    slots.for_each([&](std::int64_t slot, std::int64_t c) {
      for (std::int64_t lane = 0; lane < L; ++lane) {
        auto const i = static_cast<std::size_t>(slot + lane);
        finish(pivot[i], first[i], second[i], inverse, mean[c + lane], m2[c + lane]);
      }
    });
  }

  static void finish(double pivot, double first, double second, double inverse, double& mean, double& m2) {
    mean = pivot + first * inverse;
    // A NaN stays one: max returns its first argument unless that is the smaller.
    m2 = std::max(second - first * first * inverse, 0.0);
  }

  tensor_view<T const> x_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
