#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// Calls f(executor, first, length) for disjoint ranges of channels which are all of them, possibly at the same time: for blocks that
/// fit the cache, where f reads `inputs` tensors like each of `batches` twice, or for all channels at once where blocks are no gain.
///
/// `batches`: `[N_k, C, S_k]`.
template <class T, class F>
void for_each_block(executor_ref exec, std::int64_t channels, std::span<tensor_view<T const> const> batches,
                    std::int64_t inputs, F const& f) {
  std::int64_t samples = 0, block = channels;
  bool worth = true;
  for (auto const& batch : batches) samples += batch.samples;
  for (auto batch : batches) {
    if (batch.size() == 0) continue;
    batch.samples = samples; // a block has a part of each
    block = std::min(block, detail::block_of_channels(batch, inputs));
    worth = worth && detail::worth_blocking(exec, batch, block);
  }
  if (!worth || block == channels) return f(exec, std::int64_t{0}, channels);
  detail::channel_blocks const blocks{channels, block};
  detail::for_each_run(exec, blocks, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) f(executor_ref{serial_executor{}}, blocks.first(i), blocks.size(i));
  });
}

} // namespace syncnorm::host
