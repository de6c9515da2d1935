#pragma once

#include <cstdint>
#include <vector>

#include <syncnorm/ops/detail/exchange.hpp>

namespace syncnorm {

/// Where the statistics of a forward pass came from, and hence what its backward pass has to do.
enum class statistics_scope : std::uint8_t {
  all_ranks, ///< the batch over all ranks: the backward pass exchanges
  this_rank, ///< this rank's batch alone: the backward pass does not exchange
  constant,  ///< the running statistics: they have no gradient
};

/// What a forward pass leaves for its backward pass, besides x.
struct batch_norm_saved {
  statistics_scope scope = statistics_scope::all_ranks;
  std::int64_t count = 0;            ///< elements of a channel over the scope; 0 where the statistics are constant
  std::vector<double> mean, inv_std; ///< `[C]`, inv_std = 1/√(var + eps); the same bits on every rank
};

/// Buffers of the passes of one layer, and its ranks' standing agreement on the number of channels, by which a pass
/// after the first is one collective. Use it on every rank for the same calls. Without one, each pass makes its own,
/// and a forward pass of more than 128 channels is two collectives.
struct batch_norm_workspace {
  explicit batch_norm_workspace(std::int64_t channels, bool agreed = false) : exchange{channels, agreed} {}

  detail::channel_exchange exchange;
  std::vector<double> first, second; // `[C]`: m2; or the sums of the backward pass
};

} // namespace syncnorm
