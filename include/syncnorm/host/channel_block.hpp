#pragma once

#include <algorithm>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>

namespace syncnorm::host {

/// What a block of channels may take of the second-level cache, in bytes: half of that of common server cores.
inline constexpr std::int64_t channel_block_bytes = 1 << 20;

/// How many channels of `x` to read, reduce and read again before going on to the next ones, so that the second reading
/// comes from the cache: at least one row, or one cache line of contiguous channels. All channels where even that does
/// not fit contiguous channels, since columns narrower than a page are then slower than reading twice.
template <class T>
[[nodiscard]] std::int64_t channel_block(tensor_view<T> const& x) {
  constexpr std::int64_t bytes = sizeof(T), line = 64 / bytes;
  std::int64_t const channel = std::max<std::int64_t>(1, x.count() * bytes), fit = channel_block_bytes / channel;
  std::int64_t const all = std::max<std::int64_t>(1, x.channels);
  if (detail::common_layout(x) != detail::layout::channels) return std::clamp<std::int64_t>(fit, 1, all);
  return fit < line ? all : std::min(all, fit / line * line);
}

namespace detail {

/// Channels that one task reduces: a block of rows, or as wide a part of contiguous channels as there is.
template <class T>
[[nodiscard]] std::int64_t reduction_chunk(tensor_view<T> const& x) {
  return common_layout(x) == layout::channels ? x.channels : channel_block(x);
}

} // namespace detail

} // namespace syncnorm::host
