#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/detail/exchange.hpp>

namespace syncnorm::detail {

/// The parts in which a pass would exchange, and whether it would reduce one while the one before is exchanged.
struct part_choice {
  std::int64_t channels; ///< 0: the rank has no say
  bool ahead;
};

/// How a rank would cut the exchange of a pass that reads `tensors` tensors like `x` twice. Where an exchange costs far less
/// than the arithmetic of a block that fits the cache: in such blocks, one for each thread, finished before the next, since
/// two would not fit as well. Else, of a tensor whose arithmetic takes far longer than an exchange, in halves, so that what a
/// message is late is spent on the other half. Else in one.
template <class C, class T>
[[nodiscard]] part_choice choose_parts(host::executor_ref exec, C const& comm, tensor_view<T> const& x, int tensors) {
  constexpr double bytes_per_second = 1e10, worthwhile = 10;
  constexpr std::int64_t part_bytes = 1 << 19; // smaller ones, though more would fit, are exchanged more often
  if (x.size() == 0) return {0, false};
  std::int64_t const concurrency = exec.concurrency(), half = (x.channels + 1) / 2;
  std::int64_t const block = std::min(host::channel_block(x, tensors, {part_bytes}) * concurrency, x.channels);
  auto const seconds = [&](std::int64_t channels) {
    return static_cast<double>(channels * x.count() * static_cast<std::int64_t>(sizeof(T)) * tensors) /
           (bytes_per_second * static_cast<double>(concurrency));
  };
  double const enough = worthwhile * syncnorm::exchange_overhead(comm);
  if (seconds(block) > enough) return {block, false};
  if (syncnorm::overlaps(comm) && seconds(half) > enough) return {half, true};
  return {std::numeric_limits<std::int64_t>::max(), false};
}

/// What to fetch while `part` of `x` is written.
template <class T>
[[nodiscard]] host::next_block part_after(tensor_view<T> const& x, std::int64_t tensors, channel_span part) {
  bool const last = part.first + part.length >= x.channels;
  return host::next_block::of(x.channel_range(part.first, part.length), tensors, last ? 0 : part.length);
}

/// The same where `x` may be several micro-batches, of which the others are read in between.
template <class T>
[[nodiscard]] host::next_block next_of(std::span<tensor_view<T const> const> x, std::size_t k, std::int64_t tensors,
                                       channel_span part) {
  return x.size() == 1 ? part_after(x[k], tensors, part) : host::next_block{};
}

} // namespace syncnorm::detail
