#pragma once

#include <algorithm>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>

namespace syncnorm::host {

/// What the inputs of a block of channels may take of the second-level cache, in bytes; the inputs of the next block are
/// fetched beside it.
inline constexpr std::int64_t channel_block_bytes = 1 << 19;

/// The narrowest column of contiguous channels that a block may be, in bytes: narrower ones are slower to read than the
/// whole rows are to read twice.
inline constexpr std::int64_t narrowest_column_bytes = 1 << 10;

/// How many channels to read, reduce and read again before going on to the next ones, so that the second reading comes
/// from the cache; at least one. All channels where these are contiguous and a column of fitting width is too narrow.
/// `inputs` tensors like `x` are read.
template <class T>
[[nodiscard]] std::int64_t channel_block(tensor_view<T> const& x, std::int64_t inputs = 1) {
  constexpr std::int64_t bytes = sizeof(T), line = 64 / bytes;
  std::int64_t const channel = std::max<std::int64_t>(1, x.count() * bytes * inputs);
  std::int64_t const fit = channel_block_bytes / channel, all = std::max<std::int64_t>(1, x.channels);
  if (detail::common_layout(x) != detail::layout::channels) return std::clamp<std::int64_t>(fit, 1, all);
  return fit * bytes < narrowest_column_bytes ? all : std::min(all, fit / line * line);
}

} // namespace syncnorm::host
