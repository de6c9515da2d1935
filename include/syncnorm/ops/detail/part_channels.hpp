#pragma once

#include <cstdint>
#include <limits>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>

namespace syncnorm::detail {

/// Channels of `x` to exchange at a time, in a pass that reads `tensors` tensors like it twice. Parts that fit the cache
/// are worth it where exchanging one costs this rank far less than its arithmetic.
template <class C, class T>
[[nodiscard]] std::int64_t part_channels(C const& comm, tensor_view<T> const& x, int tensors) {
  constexpr double bytes_per_second = 1e10, worthwhile = 10;
  if (x.size() == 0) return 1; // has no say
  std::int64_t const block = host::channel_block(x, tensors);
  auto const bytes = static_cast<double>(block * x.count() * static_cast<std::int64_t>(sizeof(T)) * tensors);
  bool const pays = bytes / bytes_per_second > worthwhile * exchange_overhead(comm);
  return pays ? block : std::numeric_limits<std::int64_t>::max();
}

} // namespace syncnorm::detail
