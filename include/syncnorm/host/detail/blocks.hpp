#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// `channel_block`, or, where positions are taken for channels, fewer than all: `channels_of_table`.
template <class T>
[[nodiscard]] std::int64_t block_of_channels(tensor_view<T> const& x, std::int64_t inputs = 1) {
  std::int64_t const block = channel_block(x, inputs);
  if (block == x.channels || !table_folds(x.channel_range(0, std::min<std::int64_t>(1, x.channels)))) return block;
  return std::min(block, channels_of_table<std::remove_const_t<T>>(x.spatial));
}

/// Of so many threads, how many had better share each `block` of channels with contiguous rows, of which `inputs` tensors like `x` are
/// summed: the fewest that have room for two blocks in their caches, or else for one; not where a block is mapped by itself, instead of in
/// turns with the next one's sums, be these of a few vectors (`interleaves`).
template <class T>
[[nodiscard]] std::int64_t shares_of_block(tensor_view<T> const& x, std::int64_t block, std::int64_t inputs,
                                           std::int64_t threads, bool interleaves = false,
                                           processor const& on = processor::here()) {
  if (!(on.foresees || interleaves) || !has_rows(x) || are_short_rows(x.spatial)) return 1;
  std::int64_t const bytes = x.count() * block * inputs * static_cast<std::int64_t>(sizeof(T)),
                     groups_of_pieces = groups{x}.count, most = std::min({threads, groups_of_pieces, x.samples});
  std::int64_t widest = 1;
  for (std::int64_t shares = 1; shares <= most; ++shares) {
    bool const even = groups_of_pieces % shares == 0 || groups_of_pieces >= 8 * shares;
    if (!even || threads % shares != 0) continue;
    if (2 * bytes <= shares * on.room_for_blocks()) return shares;
    if (bytes <= shares * on.second_level) widest = shares;
  }
  return widest;
}

/// Whether to take channels in blocks: not where a block is all of them, nor where blocks are too few to occupy the
/// executor, which then does better with parts of channels. Of `shared_inputs` tensors, if any, threads may share a block.
template <class T>
[[nodiscard]] bool worth_blocking(executor_ref exec, tensor_view<T> const& x, std::int64_t block,
                                  std::int64_t shared_inputs = 0) {
  if (x.size() == 0) return false;
  std::int64_t const blocks = x.channels / block, threads = exec.concurrency(),
                     shares = shared_inputs == 0 ? 1 : shares_of_block(x, block, shared_inputs, threads),
                     teams = threads / shares;
  return teams == 1 ? blocks > 1 : blocks >= 4 * teams || (blocks > 1 && blocks % teams == 0);
}

/// Consecutive channels of a pass in blocks, all of one length but the last, which takes what is left over, so that none is
/// too narrow for vectors.
struct channel_blocks {
  std::int64_t channels, length, count = std::max<std::int64_t>(1, channels / length);

  [[nodiscard]] std::int64_t first(std::int64_t i) const { return i * length; }
  [[nodiscard]] std::int64_t size(std::int64_t i) const {
    return (i + 1 == count ? channels : first(i + 1)) - first(i);
  }
};

/// Calls f(begin, end) for runs of consecutive blocks, so many to a thread; for one of all where there is one thread.
template <class F>
void for_each_run(executor_ref exec, channel_blocks const& blocks, std::int64_t runs_per_thread, F const& f) {
  std::int64_t const concurrency = exec.concurrency();
  std::int64_t const runs = concurrency == 1 ? 1 : std::min(blocks.count, runs_per_thread * concurrency);
  exec.for_each(runs, [&](std::int64_t run) { f(run * blocks.count / runs, (run + 1) * blocks.count / runs); });
}

/// Calls f(first, length) for each block of channels.
template <class F>
void for_each_block(executor_ref exec, channel_blocks const& blocks, F const& f) {
  exec.for_each(blocks.count, [&](std::int64_t i) { f(blocks.first(i), blocks.size(i)); });
}

/// For each block of channels: `reduce(first, length)`, and `make_map(first, length, table)` while the block is in the cache,
/// which makes an `elementwise_map` with `x` among its inputs; `inputs` tensors are read. Each thread takes several blocks in a row,
/// and reads the next while it writes one, if both have room: reading and writing memory at the same time is faster than one
/// after the other.
template <class T, class Reduce, class MakeMap>
void reduce_and_map(executor_ref exec, channel_blocks const& blocks, tensor_view<T const> const& x, std::int64_t inputs,
                    Reduce const& reduce, MakeMap const& make_map) {
  using A = accumulate_t<T>;
  using map_type = std::invoke_result_t<MakeMap const&, std::int64_t, std::int64_t, A*>;
  for_each_run(exec, blocks, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t const first = blocks.first(i), length = blocks.size(i);
      reduce(first, length);
      auto const part = x.channel_range(first, length);
      scratch_lease<A> table{map_type::table_size(part)};
      map_type const map = make_map(first, length, table.data());
      auto const fetch = next_block::of(part, inputs, i + 1 < end ? length : 0);
      boxes const tasks = map.tasks();
      for (std::int64_t task = tasks.count(); task-- > 0;) map(tasks[task], fetch.channels_ahead);
    }
    stream_fence();
  });
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
