#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/column_moments.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_row_moments.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/strided_rows.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Means and centred second moments of channels over one group of pieces; see reduce_channels.
template <class T>
class moments_kernel {
public:
  static constexpr std::size_t sum_count = moment_rows<T>::sum_count;

  moments_kernel(tensor_view<T const> const& x, groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group,
                                    sums_of_channels<sum_count> const& to) const {
    tensor_view<T const> const x = x_.channel_range(first, length);
    if (layout_ == layout::rows && are_short_rows(x.spatial)) {
      short_row_moments(x, parts_, nullptr, group, parts_.elements(group), to);
    } else if (layout_ != layout::channels) {
      rows(x, group, to);
    } else {
      column_moments(x, parts_, nullptr, group, parts_.elements(group), to);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    moment_rows<T>::merge(before, more, to, from, length);
  }

private:
  void rows(tensor_view<T const> const& x, std::int64_t group, sums_of_channels<sum_count> const& to) const {
    constexpr auto at_once = moment_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(x_, parts_, 1);
    for (std::int64_t begin = 0; begin < x.channels; begin += at_once) {
      std::int64_t const some = std::min<std::int64_t>(at_once, x.channels - begin);
      std::optional<copied_rows<T, 1>> copies;
      if (layout_ == layout::strided) copies.emplace();
      moment_rows<T> sums{x.channel_range(begin, some), parts_, copies ? &*copies : nullptr};
      sum_rows(sums, parts_, group, some, fetch, from_channel(to, begin));
    }
  }

  tensor_view<T const> x_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
