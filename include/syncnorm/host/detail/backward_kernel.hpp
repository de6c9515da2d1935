#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/gradient_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Σ dy and Σ dy·(x − mean) of channels over one group of pieces; see reduce_channels. The elements' arithmetic takes the
/// mean rounded to their type; what that loses is added in double.
template <class T>
class backward_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  /// Pieces shorter than this are taken some at a time.
  static constexpr std::int64_t shortest = 8;
  /// Of these in each tensor, columns that are a power of two apart still share a set of the first-level cache.
  static constexpr std::size_t rows_at_once = 4;

public:
  backward_kernel(tensor_view<T const> const& dy, tensor_view<T const> const& x, std::span<double const> mean,
                  groups const& parts)
      : dy_{dy}, x_{x}, mean_{mean}, parts_{parts}, layout_{common_layout(dy, x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_xmu) const {
    tensor_view<T const> const dy = dy_.channel_range(first, length), x = x_.channel_range(first, length);
    if (layout_ == layout::rows && are_short_rows(x.spatial))
      return short_rows(dy, x, mean_.data() + first, group, sum_dy, sum_dy_xmu);
    if (layout_ != layout::channels) return rows(dy, x, mean_.data() + first, group, sum_dy, sum_dy_xmu);
    constexpr int lanes = native_lanes<A>, double_lanes = native_lanes<double>;
    centers center;
    for (std::int64_t c = 0; c < length; ++c) {
      center[static_cast<std::size_t>(c)] = static_cast<A>(mean_[static_cast<std::size_t>(first + c)]);
      sum_dy[c] = sum_dy_xmu[c] = 0;
    }
    if (parts_.cut.length >= shortest) {
      if (length < lanes)
        channels<1, 0>(dy, x, center, group, sum_dy, sum_dy_xmu);
      else if (far_lookahead_level<T>(2 * x.channels) == 1)
        channels<lanes, 1>(dy, x, center, group, sum_dy, sum_dy_xmu);
      else
        channels<lanes, 2>(dy, x, center, group, sum_dy, sum_dy_xmu);
    } else if (length >= lanes) {
      elements<lanes>(dy, x, center, group, sum_dy, sum_dy_xmu);
    } else {
      length >= double_lanes ? elements<double_lanes>(dy, x, center, group, sum_dy, sum_dy_xmu)
                             : elements<1>(dy, x, center, group, sum_dy, sum_dy_xmu);
    }
    move_to_means<A>(mean_.data() + first, length, sum_dy, sum_dy_xmu);
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    gradient_rows<T>::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  using centers = std::array<A, most>;

  void rows(tensor_view<T const> const& dy, tensor_view<T const> const& x, double const* mean, std::int64_t group,
            double* sum_dy, double* sum_dy_xmu) const {
    constexpr auto at_once = gradient_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(x_, parts_, 2);
    for (std::int64_t begin = 0; begin < x.channels; begin += at_once) {
      std::int64_t const some = std::min<std::int64_t>(at_once, x.channels - begin);
      gradient_rows<T> sums{dy.channel_range(begin, some), x.channel_range(begin, some), mean + begin, layout_};
      sum_rows(sums, parts_, group, some, fetch, sum_dy + begin, sum_dy_xmu + begin);
    }
  }

  /// dy and x − center.
  struct terms {
    static constexpr std::size_t inputs = 2, coefficients = 1;
    double const* mean;

    std::array<A, coefficients> operator()(std::int64_t c) const { return {static_cast<A>(mean[c])}; }

    template <class V>
    [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                             std::array<V, coefficients> const& k) const {
      return {in[0], in[1] - k[0]};
    }
  };

  void short_rows(tensor_view<T const> const& dy, tensor_view<T const> const& x, double const* mean, std::int64_t group,
                  double* sum_dy, double* sum_dy_xmu) const {
    short_row_sums<T, terms> const sums{{mean}, {dy, x}};
    sums(parts_.begin(group), parts_.end(group), sum_dy, sum_dy_xmu);
    move_to_means<A>(mean, x.channels, sum_dy, sum_dy_xmu);
  }

  /// Long pieces: one lane per channel, four positions at a time.
  template <int L, int Level>
  void channels(tensor_view<T const> const& dy, tensor_view<T const> const& x, centers const& center,
                std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{x.channels};
    std::array<A, most> firsts, seconds;
    std::array<double, most> first, second;
    std::fill_n(first.data(), places.size(), 0.0);
    std::fill_n(second.data(), places.size(), 0.0);
    auto const used = static_cast<std::size_t>(places.size());
    std::int64_t const ahead = positions_ahead<T>(2 * x.channels);
    parts_.for_each_run(group, longest_column, [&](groups::piece const& now) {
      std::int64_t const length = now.length, dy_step = dy.stride_s, x_step = x.stride_s;
      T const* const dy_row = &dy(now.sample, 0, now.begin);
      T const* const x_row = &x(now.sample, 0, now.begin);
      std::fill_n(firsts.data(), used, A{0});
      std::fill_n(seconds.data(), used, A{0});
      std::int64_t s = 0;
      for (; s + 4 <= length; s += 4) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          T const* const g = dy_row + s * dy_step + c;
          T const* const from = x_row + s * x_step + c;
          auto const i = static_cast<std::size_t>(slot);
#pragma GCC unroll 4
          for (int r = 0; L > 1 && r < 4; ++r) {
            prefetch<L, Level>(g, (ahead + r) * dy_step);
            prefetch<L, Level>(from, (ahead + r) * x_step);
          }
          vector const m = load<L>(&center[static_cast<std::size_t>(c)]);
          vector const g0 = load<L>(g), g1 = load<L>(g + dy_step), g2 = load<L>(g + 2 * dy_step),
                       g3 = load<L>(g + 3 * dy_step);
          vector const d0 = load<L>(from) - m, d1 = load<L>(from + x_step) - m;
          vector const d2 = load<L>(from + 2 * x_step) - m, d3 = load<L>(from + 3 * x_step) - m;
          store<L>(&firsts[i], load<L>(&firsts[i]) + ((g0 + g1) + (g2 + g3)));
          store<L>(&seconds[i], load<L>(&seconds[i]) +
                                    (multiply_add<vector>(g1, d1, g0 * d0) + multiply_add<vector>(g3, d3, g2 * d2)));
        });
      }
      for (; s < length; ++s) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          auto const i = static_cast<std::size_t>(slot);
          vector const g = load<L>(dy_row + s * dy_step + c);
          vector const d = load<L>(x_row + s * x_step + c) - load<L>(&center[static_cast<std::size_t>(c)]);
          store<L>(&firsts[i], load<L>(&firsts[i]) + g);
          store<L>(&seconds[i], multiply_add(g, d, load<L>(&seconds[i])));
        });
      }
      for (std::size_t i = 0; i < used; ++i) first[i] += static_cast<double>(firsts[i]);
      for (std::size_t i = 0; i < used; ++i) second[i] += static_cast<double>(seconds[i]);
    });
    finish_slots(places, first, second, sum_dy, sum_dy_xmu);
  }

  /// Short pieces, as in (N, C): the sums of some rows at a time go into double.
  template <int L>
  void elements(tensor_view<T const> const& dy, tensor_view<T const> const& x, centers const& center,
                std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{x.channels};
    std::array<double, most> first, second;
    std::fill_n(first.data(), places.size(), 0.0);
    std::fill_n(second.data(), places.size(), 0.0);
    std::array<T const*, rows_at_once> dy_rows, x_rows;
    std::size_t waiting = 0;
    bool const fetch = level_to_fetch(x_) == 2;
    std::int64_t const ahead = positions_ahead<T>(2 * x.channels, rows_at_once);
    std::int64_t const dy_ahead = ahead * dy.stride_n, x_ahead = ahead * x.stride_n;
    auto const flush = [&] {
      places.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot);
        vector const m = load<L>(&center[static_cast<std::size_t>(c)]);
        vector a{}, b{};
        for (std::size_t r = 0; r < waiting; ++r) {
          if (fetch) {
            prefetch<L, 2>(dy_rows[r] + c, dy_ahead);
            prefetch<L, 2>(x_rows[r] + c, x_ahead);
          }
          vector const g = load<L>(dy_rows[r] + c);
          a += g;
          b = multiply_add<vector>(g, load<L>(x_rows[r] + c) - m, b);
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now) {
      for (std::int64_t s = 0; s < now.length; ++s) {
        dy_rows[waiting] = &dy(now.sample, 0, now.begin + s);
        x_rows[waiting++] = &x(now.sample, 0, now.begin + s);
        if (waiting == x_rows.size()) flush();
      }
    });
    flush();
    finish_slots(places, first, second, sum_dy, sum_dy_xmu);
  }

  template <int L>
  static void finish_slots(lane_slots<L> const& places, std::array<double, most> const& first,
                           std::array<double, most> const& second, double* sum_dy, double* sum_dy_xmu) {
    places.for_each([&](std::int64_t slot, std::int64_t c) {
      std::copy_n(first.data() + slot, L, sum_dy + c);
      std::copy_n(second.data() + slot, L, sum_dy_xmu + c);
    });
  }

  tensor_view<T const> dy_, x_;
  std::span<double const> mean_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
