#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/masked_moment_rows.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Moments of the elements that count, over one group of pieces; see reduce_channels and masked_moment_rows.
template <class T>
class masked_moments_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  static constexpr std::int64_t rows_at_once = 8;

public:
  masked_moments_kernel(tensor_view<T const> const& x, masked_groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* mean,
                                    double* m2) const {
    if (parts_.elements(group) == 0) {
      std::fill_n(mean, length, 0.0);
      std::fill_n(m2, length, 0.0);
      return;
    }
    tensor_view<T const> const x = x_.channel_range(first, length);
    constexpr int lanes = native_lanes<A>;
    if (layout_ != layout::channels) {
      rows(x, group, mean, m2);
    } else {
      length >= lanes ? elements<lanes>(x, group, mean, m2) : elements<1>(x, group, mean, m2);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    moment_rows<T>::merge(before, more, mean, m2, mean_more, m2_more, length);
  }

private:
  void rows(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    constexpr auto at_once = masked_moment_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(x_, parts_, 1);
    for (std::int64_t begin = 0; begin < x.channels; begin += at_once) {
      std::int64_t const some = std::min(at_once, x.channels - begin);
      masked_moment_rows<T> sums{x.channel_range(begin, some), parts_, layout_};
      sum_rows(sums, parts_, group, some, fetch, mean + begin, m2 + begin);
    }
  }

  /// Contiguous channels: the sums of some positions that count at a time go into double.
  template <int L>
  void elements(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{x.channels};
    std::array<A, most> pivots;
    std::array<double, most> first, second;
    std::fill_n(first.data(), places.size(), 0.0);
    std::fill_n(second.data(), places.size(), 0.0);
    std::array<T const*, static_cast<std::size_t>(rows_at_once)> from;
    std::size_t waiting = 0;
    bool begun = false;
    std::int64_t const ahead = positions_ahead<T>(x.channels, rows_at_once) * x.stride_s;
    auto const flush = [&] {
      if (waiting == 0) return;
      if (!begun) {
        places.for_each([&](std::int64_t slot, std::int64_t c) {
          vector const base = load<L>(from[0] + c);
          vector sum{};
          for (std::size_t r = 1; r < waiting; ++r) sum += load<L>(from[r] + c) - base;
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
          prefetch<L, 2>(from[r] + c, ahead);
          vector const d = load<L>(from[r] + c) - p;
          a += d;
          b = multiply_add(d, d, b);
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now) {
      auto const& counted = parts_.mask.at(now);
      std::uint8_t const* const mask = parts_.mask.row(now.sample) + now.begin;
      for (std::int64_t s = counted.first; s < counted.last; ++s) {
        if (mask[s] == 0) continue;
        from[waiting++] = &x(now.sample, 0, now.begin + s);
        if (waiting == from.size()) flush();
      }
    });
    flush();
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    places.for_each([&](std::int64_t slot, std::int64_t c) {
      for (std::int64_t lane = 0; lane < L; ++lane) {
        auto const i = static_cast<std::size_t>(slot + lane);
        finish_moments(static_cast<double>(pivots[i]), first[i], second[i], inverse, mean[c + lane], m2[c + lane]);
      }
    });
  }

  tensor_view<T const> x_;
  masked_groups const& parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
