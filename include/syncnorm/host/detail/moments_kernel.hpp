#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/column_moments.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Means and centred second moments of channels over one group of pieces; see reduce_channels.
template <class T>
class moments_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);

public:
  moments_kernel(tensor_view<T const> const& x, groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* mean,
                                    double* m2) const {
    tensor_view<T const> const x = x_.channel_range(first, length);
    if (layout_ == layout::rows && are_short_rows(x.spatial)) {
      short_rows(x, group, mean, m2);
    } else if (layout_ != layout::channels) {
      rows(x, group, mean, m2);
    } else {
      column_moments(x, parts_, nullptr, group, parts_.elements(group), mean, m2);
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
    auto const sum = [&](std::int64_t first, std::int64_t length) {
      short_row_sums<T, moment_terms<A>> const sums{{pivots.data() + first}, {x.channel_range(first, length)}};
      sums(begin, parts_.end(group), mean + first, m2 + first);
    };
    sum(0, x.channels);
    auto const n = static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < x.channels; ++c) {
      auto& pivot = pivots[static_cast<std::size_t>(c)];
      if (sums_cancel(mean[c], m2[c], n)) {
        pivot = static_cast<A>(static_cast<double>(pivot) + mean[c] / n);
        sum(c, 1);
      }
      finish_moments(static_cast<double>(pivot), mean[c], m2[c], 1 / n, mean[c], m2[c]);
    }
  }

  tensor_view<T const> x_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
