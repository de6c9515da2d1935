#pragma once

#include <cstddef>
#include <cstdint>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::detail {

/// How the values of the ranks become one.
enum class merge_rule : std::uint8_t {
  moments, ///< two values for each channel, mean and m2, of the counts in the headers
  sums,    ///< any values for each channel
};

/// The cheaper policy for `layers` layers with `values` numbers for each of `channels` channels in all. The reduce form of
/// moments takes two allreduces, since m2 is taken about the mean of all ranks. `gathered`: bytes that reducing ranks gather besides.
[[nodiscard]] constexpr exchange_policy cheaper_policy(exchange_cost const& cost, int ranks, merge_rule rule,
                                                       std::int64_t channels, std::size_t values, std::size_t layers,
                                                       std::size_t gathered = 0) {
  if (!cost.reduction_scales) return exchange_policy::gather;
  double const numbers = 8.0 * static_cast<double>(channels), all = numbers * static_cast<double>(values);
  double const agreement = 8.0 * static_cast<double>(9 + 3 * layers);
  double const gather = seconds_of_gather(cost, ranks, static_cast<double>(sizeof(packet_header) * layers) + all);
  double const reduce = rule == merge_rule::sums ? seconds_of_reduce(cost, ranks, agreement + all)
                                                 : seconds_of_reduce(cost, ranks, agreement + numbers) +
                                                       seconds_of_reduce(cost, ranks, numbers);
  double const besides = gathered == 0 ? 0 : seconds_of_gather(cost, ranks, static_cast<double>(gathered));
  return reduce + besides < gather ? exchange_policy::reduce : exchange_policy::gather;
}

/// As the options of a pass have it.
[[nodiscard]] inline exchange_policy policy_asked(packet_header const& own) {
  return static_cast<exchange_policy>(own.wish);
}

/// What `wish` comes to over `comm`; the same on every rank, as all that it depends on is. A communicator without
/// allreduce gathers.
template <communicator C>
[[nodiscard]] exchange_policy resolve(exchange_policy wish, C const& comm, merge_rule rule, std::int64_t channels,
                                      std::size_t values = 2, std::size_t layers = 1) {
  if constexpr (allreduces<C, double>) {
    if (wish != exchange_policy::automatic) return wish;
    return cheaper_policy(syncnorm::cost_of_exchange(comm), syncnorm::size(comm), rule, channels, values, layers);
  } else {
    return exchange_policy::gather;
  }
}

/// `resolve` for passes in device memory, whose ranks gather their headers even where they reduce.
template <communicator C>
[[nodiscard]] exchange_policy resolve_on_stream(exchange_policy wish, C const& comm, merge_rule rule,
                                                std::int64_t channels, std::size_t values = 2, std::size_t layers = 1) {
  if constexpr (allreduces_on_stream<C, double>) {
    if (wish != exchange_policy::automatic) return wish;
    return cheaper_policy(syncnorm::cost_of_exchange(comm), syncnorm::size(comm), rule, channels, values, layers,
                          layers * sizeof(packet_header));
  } else {
    return exchange_policy::gather;
  }
}

/// Whether such passes, of so many values a channel, gather packets; two are both those of forward and of backward passes.
template <communicator C>
[[nodiscard]] bool gathers_on_stream(exchange_policy wish, C const& comm, std::int64_t channels, std::size_t values) {
  auto const gathers = [&](merge_rule rule) {
    return resolve_on_stream(wish, comm, rule, channels, values) == exchange_policy::gather;
  };
  return gathers(merge_rule::sums) || (values == 2 && gathers(merge_rule::moments));
}

} // namespace syncnorm::detail
