#pragma once

#include <bit>
#include <cstdint>

#include <syncnorm/comm/communicator.hpp>

namespace syncnorm {

/// What moving data costs a communicator, for choosing between collectives; not for predicting times.
struct exchange_cost {
  double latency = 1e-5;   ///< seconds of one trip between two ranks
  double bandwidth = 1e10; ///< bytes per second into one rank
  double handling = 6e-10; ///< seconds in which a rank merges two received numbers into its own
  /// Whether an allreduce moves less than an allgather of the same; else nothing is ever reduced unless the user says so.
  bool reduction_scales = true;

  bool operator==(exchange_cost const&) const = default;
};

/// What `comm` says by a member of this name, which has to be the same on every rank and does not throw; else that of a usual
/// network. Local.
template <communicator C>
[[nodiscard]] exchange_cost cost_of_exchange(C const& comm) {
  if constexpr (requires { comm.cost_of_exchange(); })
    return comm.cost_of_exchange();
  else
    return {};
}

/// Trips on the longest path of a tree over `ranks` ranks, ⌈log₂ ranks⌉.
[[nodiscard]] constexpr int tree_depth(int ranks) {
  return ranks < 2 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint32_t>(ranks - 1)));
}

/// An allgather of `bytes` from each rank: ⌈log₂ P⌉·latency + (P − 1)·bytes/bandwidth, and the handling of the numbers of
/// all ranks. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
[[nodiscard]] constexpr double seconds_of_gather(exchange_cost const& cost, int ranks, double bytes) {
  double const others = ranks - 1;
  return tree_depth(ranks) * cost.latency + others * bytes * (1 / cost.bandwidth + cost.handling / 16);
}

/// An allreduce of `bytes`: 2·⌈log₂ P⌉·latency + 2·(P − 1)/P·bytes/bandwidth, and the handling. Source: the same.
[[nodiscard]] constexpr double seconds_of_reduce(exchange_cost const& cost, int ranks, double bytes) {
  double const share = static_cast<double>(ranks - 1) / ranks;
  return 2 * tree_depth(ranks) * cost.latency + share * bytes * (2 / cost.bandwidth + cost.handling / 16);
}

} // namespace syncnorm
