#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host {

/// The least that a block may take of a position, where channels are contiguous, in bytes: less is slower to read than everything is to
/// read twice.
inline constexpr std::int64_t narrowest_block_bytes = 1 << 10;

/// What a block of channels may take, in bytes.
struct block_room {
  std::int64_t cache; ///< its inputs, of the second-level cache
  /// Rows of a sample that follow each other, of several channels, unless the cache has room for three times as many.
  std::int64_t run = std::numeric_limits<std::int64_t>::max();
  /// What it takes of these at least: less is slower to read than everything is to read twice.
  std::int64_t shortest_run = narrowest_block_bytes;

  /// On the processor at hand; the inputs of the next block are fetched beside it.
  [[nodiscard]] static block_room here() {
    auto const& on = detail::processor::here();
    return {on.second_level / 4, on.longest_run(), on.shortest_run()};
  }
};

/// How many channels to read, reduce and read again before going on to the next ones, so that the second reading comes
/// from the cache; at least one. All channels where what fits would be too narrow. `inputs` tensors like `x` are read.
template <class T>
[[nodiscard]] std::int64_t channel_block(tensor_view<T> const& x, std::int64_t inputs = 1,
                                         block_room const& room = block_room::here()) {
  constexpr std::int64_t bytes = sizeof(T), line = detail::line_elements<T>;
  std::int64_t const channel = std::max<std::int64_t>(1, x.count() * bytes * inputs);
  std::int64_t const fit = room.cache / channel, all = std::max<std::int64_t>(1, x.channels);
  if (detail::has_rows(x) && x.stride_c == x.spatial) {
    std::int64_t const row = x.spatial * bytes, some = fit * row / 3 < room.run ? std::min(fit, room.run / row) : fit;
    if (std::max<std::int64_t>(1, fit) * row < room.shortest_run) return all;
    return std::min(detail::in_whole_lines<T>(some, x.spatial), all);
  }
  if (detail::channels_share_lines(x)) return all;
  if (detail::common_layout(x) != detail::layout::channels) return std::clamp<std::int64_t>(fit, 1, all);
  return fit * bytes < narrowest_block_bytes ? all : std::min(all, fit / line * line);
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
