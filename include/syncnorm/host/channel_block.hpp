#pragma once

#include <algorithm>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host {

/// What the inputs of a block of channels may take of the second-level cache, in bytes; the inputs of the next block are
/// fetched beside it.
[[nodiscard]] inline std::int64_t channel_block_bytes() { return detail::processor::here().second_level / 4; }

/// The narrowest column of contiguous channels that a block may be, in bytes: narrower ones are slower to read than the
/// whole rows are to read twice.
inline constexpr std::int64_t narrowest_column_bytes = 1 << 10;

/// How many channels to read, reduce and read again before going on to the next ones, so that the second reading comes
/// from the cache; at least one. All channels where these are contiguous and a column of fitting width is too narrow.
/// `inputs` tensors like `x` are read; `block_bytes`: what they may take of the cache.
template <class T>
[[nodiscard]] std::int64_t channel_block(tensor_view<T> const& x, std::int64_t inputs = 1,
                                         std::int64_t block_bytes = channel_block_bytes()) {
  constexpr std::int64_t bytes = sizeof(T), line = detail::line_elements<T>;
  std::int64_t const channel = std::max<std::int64_t>(1, x.count() * bytes * inputs);
  std::int64_t const fit = block_bytes / channel, all = std::max<std::int64_t>(1, x.channels);
  if (detail::has_rows(x) && x.stride_c == x.spatial) return std::min(detail::in_whole_lines<T>(fit, x.spatial), all);
  if (detail::channels_share_lines(x)) return all;
  if (detail::common_layout(x) != detail::layout::channels) return std::clamp<std::int64_t>(fit, 1, all);
  return fit * bytes < narrowest_column_bytes ? all : std::min(all, fit / line * line);
}

/// The block of channels after the one at hand. Reading it into the cache while the one at hand is written is faster than one after the
/// other, if both have room there, or in the next level.
struct next_block {
  std::int64_t channels_ahead = 0; ///< 0: none

  /// The block `channels_ahead` further than `x`, of which `inputs` tensors are read, unless it is too large.
  template <class T>
  [[nodiscard]] static next_block of(tensor_view<T> const& x, std::int64_t inputs, std::int64_t channels_ahead,
                                     detail::processor const& on = detail::processor::here()) {
    bool const fits = 2 * x.size() * inputs * static_cast<std::int64_t>(sizeof(T)) <= on.room_for_next();
    return {fits && detail::has_rows(x) ? channels_ahead : 0};
  }
};

} // namespace syncnorm::host
