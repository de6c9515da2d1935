#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Means and centred second moments of channels over one group of pieces; see reduce_channels.
template <class T>
class moments_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  /// Pieces shorter than this are taken some at a time.
  static constexpr std::int64_t shortest = 8;

public:
  moments_kernel(tensor_view<T const> const& x, groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* mean,
                                    double* m2) const {
    tensor_view<T const> const x = x_.channel_range(first, length);
    constexpr int lanes = native_lanes<A>, double_lanes = native_lanes<double>;
    if (layout_ == layout::rows && are_short_rows(x.spatial)) {
      short_rows(x, group, mean, m2);
    } else if (layout_ != layout::channels) {
      rows(x, group, mean, m2);
    } else if (parts_.cut.length >= shortest) {
      if (length < lanes)
        channels<1, 0>(x, group, mean, m2);
      else if (far_lookahead_level<T>(x.channels) == 1)
        channels<lanes, 1>(x, group, mean, m2);
      else
        channels<lanes, 2>(x, group, mean, m2);
    } else if (length >= lanes) {
      elements<lanes>(x, group, mean, m2);
    } else {
      length >= double_lanes ? elements<double_lanes>(x, group, mean, m2) : elements<1>(x, group, mean, m2);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    moment_rows<T>::merge(before, more, mean, m2, mean_more, m2_more, length);
  }

private:
  void rows(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    constexpr auto at_once = moment_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(x_, parts_, 1);
    for (std::int64_t begin = 0; begin < x.channels; begin += at_once) {
      std::int64_t const some = std::min<std::int64_t>(at_once, x.channels - begin);
      moment_rows<T> sums{x.channel_range(begin, some), parts_, layout_};
      sum_rows(sums, parts_, group, some, fetch, mean + begin, m2 + begin);
    }
  }

  /// x − pivot, to be summed and squared.
  struct terms {
    static constexpr std::size_t inputs = 1, coefficients = 1;
    A const* pivots;

    std::array<A, coefficients> operator()(std::int64_t c) const { return {pivots[c]}; }

    template <class V>
    [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                             std::array<V, coefficients> const& k) const {
      V const d = in[0] - k[0];
      return {d, d};
    }
  };

  void short_rows(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    constexpr int lanes = native_lanes<A>;
    std::int64_t const begin = parts_.begin(group);
    std::array<A, most> pivots;
    for (std::int64_t c = 0; c < x.channels; ++c) {
      vector_t<A, lanes> pilot{};
      for (std::int64_t i = 0; i < short_row_pilot; i += lanes) pilot += load<lanes>(&x(begin, c, i));
      pivots[static_cast<std::size_t>(c)] =
          sum_lanes<A, lanes>(pilot) * static_cast<A>(1.0 / static_cast<double>(short_row_pilot));
    }
    short_row_sums<T, terms> const sums{{pivots.data()}, {x}};
    sums(begin, parts_.end(group), mean, m2);
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < x.channels; ++c)
      finish_moments(static_cast<double>(pivots[static_cast<std::size_t>(c)]), mean[c], m2[c], inverse, mean[c], m2[c]);
  }

  /// Long pieces: one lane per channel, four positions at a time.
  template <int L, int Level>
  void channels(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{x.channels};
    std::array<A, most> pivots, firsts, seconds;
    std::array<double, most> pivot, first, second;
    bool begun = false;
    std::int64_t const ahead = positions_ahead<T>(x.channels) * x.stride_s;
    parts_.for_each_run(group, longest_column, [&](groups::piece const& now) {
      std::int64_t const length = now.length, pilot = std::min(length, shortest), step = x.stride_s;
      T const* const row = &x(now.sample, 0, now.begin);
      places.for_each([&](std::int64_t slot, std::int64_t c) {
        vector const base = load<L>(row + c);
        vector sum{};
        for (std::int64_t s = 1; s < pilot; ++s) sum += load<L>(row + c + s * step) - base;
        store<L>(&pivots[static_cast<std::size_t>(slot)], base + sum * static_cast<A>(1 / static_cast<double>(pilot)));
        store<L>(&firsts[static_cast<std::size_t>(slot)], vector{});
        store<L>(&seconds[static_cast<std::size_t>(slot)], vector{});
      });
      std::int64_t s = 0;
      for (; s + 4 <= length; s += 4) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          T const* const from = row + s * step + c;
          auto const i = static_cast<std::size_t>(slot);
          if constexpr (L > 1)
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) prefetch<L, Level>(from, ahead + r * step);
          vector const p = load<L>(&pivots[i]);
          vector const d0 = load<L>(from) - p, d1 = load<L>(from + step) - p;
          vector const d2 = load<L>(from + 2 * step) - p, d3 = load<L>(from + 3 * step) - p;
          store<L>(&firsts[i], load<L>(&firsts[i]) + ((d0 + d1) + (d2 + d3)));
          store<L>(&seconds[i], load<L>(&seconds[i]) +
                                    (multiply_add<vector>(d1, d1, d0 * d0) + multiply_add<vector>(d3, d3, d2 * d2)));
        });
      }
      for (; s < length; ++s) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          auto const i = static_cast<std::size_t>(slot);
          vector const d = load<L>(row + s * step + c) - load<L>(&pivots[i]);
          store<L>(&firsts[i], load<L>(&firsts[i]) + d);
          store<L>(&seconds[i], multiply_add(d, d, load<L>(&seconds[i])));
        });
      }
      double const n = static_cast<double>(length);
      auto const used = static_cast<std::size_t>(places.size());
      if (!begun) {
        for (std::size_t i = 0; i < used; ++i) {
          pivot[i] = static_cast<double>(pivots[i]) + static_cast<double>(firsts[i]) / n;
          first[i] = second[i] = 0;
        }
        begun = true;
      }
      for (std::size_t i = 0; i < used; ++i) {
        double const t = static_cast<double>(pivots[i]) - pivot[i], sum = static_cast<double>(firsts[i]);
        first[i] += multiply_add(n, t, sum);
        second[i] += multiply_add(t, multiply_add(n, t, 2 * sum), static_cast<double>(seconds[i]));
      }
    });
    finish_slots(places, group, pivot, first, second, mean, m2);
  }

  /// Short pieces, as in (N, C): the sums of some rows at a time go into double.
  template <int L>
  void elements(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{x.channels};
    std::array<A, most> pivots;
    std::array<double, most> pivot, first, second;
    std::fill_n(first.data(), places.size(), 0.0);
    std::fill_n(second.data(), places.size(), 0.0);
    std::array<T const*, static_cast<std::size_t>(shortest)> rows;
    std::size_t waiting = 0;
    bool begun = false;
    auto const flush = [&] {
      if (waiting == 0) return;
      if (!begun) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          vector const base = load<L>(rows[0] + c);
          vector sum{};
          for (std::size_t r = 1; r < waiting; ++r) sum += load<L>(rows[r] + c) - base;
          store<L>(&pivots[static_cast<std::size_t>(slot)],
                   base + sum * static_cast<A>(1 / static_cast<double>(waiting)));
        });
        begun = true;
      }
      places.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot);
        vector const p = load<L>(&pivots[i]);
        vector a{}, b{};
        for (std::size_t r = 0; r < waiting; ++r) {
          vector const d = load<L>(rows[r] + c) - p;
          a += d;
          b = multiply_add(d, d, b);
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now) {
      for (std::int64_t s = 0; s < now.length; ++s) {
        rows[waiting++] = &x(now.sample, 0, now.begin + s);
        if (waiting == rows.size()) flush();
      }
    });
    flush();
    std::copy_n(pivots.data(), places.size(), pivot.data());
    finish_slots(places, group, pivot, first, second, mean, m2);
  }

  template <int L>
  void finish_slots(lane_slots<L> const& places, std::int64_t group, std::array<double, most> const& pivot,
                    std::array<double, most> const& first, std::array<double, most> const& second, double* mean,
                    double* m2) const {
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    places.for_each([&](std::int64_t slot, std::int64_t c) {
      for (std::int64_t lane = 0; lane < L; ++lane) {
        auto const i = static_cast<std::size_t>(slot + lane);
        finish_moments(pivot[i], first[i], second[i], inverse, mean[c + lane], m2[c + lane]);
      }
    });
  }

  tensor_view<T const> x_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
