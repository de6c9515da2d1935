#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Channels to map at a time: as many as have positions that are taken for channels, where not all have and some samples share
/// their table; else all.
template <class T>
[[nodiscard]] std::int64_t channels_of_map(tensor_view<T> const& x) {
  constexpr std::int64_t fewest_samples = 4;
  std::int64_t const table = channels_of_table<std::remove_const_t<T>>(x.spatial), some = std::min(table, x.channels);
  return x.samples >= fewest_samples && !table_folds(x) && table_folds(x.channel_range(0, some)) ? some : x.channels;
}

/// Maps all of `in` to `out`, with the coefficients `terms(channel)`. `fetch`: the block of channels that is mapped next.
template <class T, class Op, class Terms>
void map_elements(executor_ref exec, Op const& op, Terms const& terms, typename elementwise_map<T, Op>::views const& in,
                  typename elementwise_map<T, Op>::out_views const& out, prepared_mask const* mask, stores how,
                  next_block fetch = {}) {
  using map_type = elementwise_map<T, Op>;
  using A = accumulate_t<T>;
  if (in[0].size() == 0) return;
  if (how == stores::automatic) how = stores_for(in[0]);
  auto const make_map = map_of_channels<T>(op, in, out, mask, how, [&](std::int64_t first, std::int64_t) {
    return [&terms, first](std::int64_t channel) { return terms(first + channel); };
  });
  std::int64_t block = in[0].channels;
  if (fetch.channels_ahead == 0) {
    for (auto const& x : in) block = std::min(block, channels_of_map(x));
    for (auto const& x : out) block = std::min(block, channels_of_map(x));
  }
  if (block < in[0].channels && worth_blocking(exec, in[0], block)) {
    auto const nothing = [](std::int64_t, std::int64_t) {};
    return reduce_and_map<T>(exec, channel_blocks{in[0].channels, block}, in[0], map_type::inputs, nothing, make_map);
  }
  scratch_lease<A> table{map_type::table_size(in[0])};
  map_boxes(exec, make_map(std::int64_t{0}, in[0].channels, table.data()), fetch.channels_ahead);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
