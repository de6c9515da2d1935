#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/detail/exchange.hpp>

namespace syncnorm::detail {

/// Channels of `x` to work on at a time where a pass reads `tensors` tensors like it twice, so that the second reading
/// comes from the cache. All where that gains nothing.
template <class T>
[[nodiscard]] std::int64_t cache_block(tensor_view<T> const& x, int tensors) {
  constexpr std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(T));
  std::int64_t const block = host::channel_block(x);
  if (block >= x.channels) return std::max<std::int64_t>(x.channels, 1);
  std::int64_t const share = block / tensors;
  return x.stride_c == 1 && share > line ? share / line * line : std::max<std::int64_t>(share, 1);
}

/// Calls f(executor, span) for blocks of channels that fit the cache: several at once with a serial executor each, or one
/// after the other all with `exec`, whichever keeps it busy.
template <class T, host::executor E, class F>
void for_each_block(E const& exec, tensor_view<T> const& x, int tensors, F const& f) {
  constexpr std::int64_t worth_splitting = 1 << 16; // bytes; less is done before another thread has begun
  std::int64_t block = cache_block(x, tensors);
  std::int64_t const threads = exec.concurrency();
  if (threads > 1 && block >= x.channels && x.size() * static_cast<std::int64_t>(sizeof(T)) > worth_splitting) {
    f(exec, channel_span{0, x.channels});
    return;
  }
  block = std::max<std::int64_t>(1, std::min(block, x.channels));
  exec.for_each((x.channels + block - 1) / block, [&](std::int64_t i) {
    f(host::serial_executor{}, channel_span{i * block, std::min(block, x.channels - i * block)});
  });
}

/// Channels of `x` to exchange at a time. Parts that fit the cache are worth it where exchanging one costs this rank far
/// less than its arithmetic; a communicator says by `exchange_overhead()`, in seconds, what one costs.
template <class C, class T>
[[nodiscard]] std::int64_t part_channels(C const& comm, tensor_view<T> const& x, int tensors) {
  if (x.size() == 0) return 1; // has no say
  if constexpr (requires { comm.exchange_overhead(); }) {
    constexpr double bytes_per_second = 1e10, worthwhile = 10;
    std::int64_t const block = cache_block(x, tensors);
    auto const seconds =
        static_cast<double>(block * x.count() * static_cast<std::int64_t>(sizeof(T)) * tensors) / bytes_per_second;
    if (seconds > worthwhile * comm.exchange_overhead()) return block;
  }
  return std::numeric_limits<std::int64_t>::max();
}

} // namespace syncnorm::detail
