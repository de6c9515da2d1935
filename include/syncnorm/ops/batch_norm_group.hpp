#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <utility>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/detail/packet_exchange.hpp>
#include <syncnorm/ops/passes.hpp>
#include <syncnorm/ops/pending_passes.hpp>

namespace syncnorm {

/// Runs passes of several layers in one collective: layers of any channels, element types, shapes and options, whose
/// outputs do not depend on one another. One packet per rank carries the statistics of all.
///
///     batch_norm_group group{comm};
///     group.run(passes(first.plan_forward(x, y), second.plan_forward(u, v)));
///
/// All ranks pass the same layers in the same order; what is wrong with one of them on one rank is thrown on every rank, or
/// on that one where none of them exchanges, and then no layer has changed. The exchange policy is that of the first. A
/// layer that needs no exchange, in evaluation or with frozen statistics, may be among them; two forward passes of one layer, or
/// passes of both directions, may not, by an invalid_argument_error on every rank. Of no layers nothing is done.
template <communicator C>
class batch_norm_group {
public:
  explicit batch_norm_group(C comm) : comm_{std::move(comm)} {}

  /// Starts the exchange of all passes, which are either forward or backward passes. Collective; see `pending_passes`, which
  /// the group has to outlive.
  template <list_of<batch_norm_pass> List>
  [[nodiscard]] pending_passes begin(List passes) {
    auto& exchange = detail::or_fail(passes, [&] { return std::ref(exchange_of(passes)); }).get();
    return pending_passes::begin(comm_, passes, exchange);
  }

  /// The same, to the end.
  template <list_of<batch_norm_pass> List>
  void run(List passes) {
    begin(std::move(passes)).finish();
  }

  [[nodiscard]] C const& comm() const noexcept { return comm_; }

private:
  [[nodiscard]] detail::packet_exchange& exchange_of(std::span<batch_norm_pass const> passes) {
    detail::kept_vector<std::int64_t> channels;
    channels.reserve(passes.size());
    for (auto const& pass : passes) channels.push_back(pass.steps().channels());
    auto const found = std::ranges::find(exchanges_, channels, &detail::packet_exchange::channels);
    return found != exchanges_.end() ? *found : exchanges_.emplace_back(std::move(channels), 2);
  }

  C comm_;
  std::deque<detail::packet_exchange> exchanges_; // of the sets of layers seen; stay where they are
};

} // namespace syncnorm
