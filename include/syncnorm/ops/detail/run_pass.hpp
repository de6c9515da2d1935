#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/fold_ranks.hpp>
#include <syncnorm/ops/detail/packet.hpp>
#include <syncnorm/ops/detail/parts.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// `run_pass`, without what explains a mismatch.
template <communicator C>
void run_steps(C const& comm, pass_steps& steps, batch_norm_workspace& workspace, exchange_plan& plan,
               part_choice const& parts) {
  if (syncnorm::size(comm) == 1 || !steps.collective()) {
    steps.require_valid();
    steps.run_alone();
    return steps.commit_alone();
  }
  channel_span const all{0, steps.channels()};
  auto own = steps.header();
  auto const policy = resolve(policy_asked(own), comm, steps.rule(), steps.channels());
  if (policy == exchange_policy::reduce) {
    auto& packets = workspace.packets;
    if (workspace.exchange.agreed()) packets.agree();
    packets.prepare(syncnorm::size(comm));
    packets.header(0) = own;
    report_what_throws(packets.header(0), [&] { steps.local(all, packets.own(0, 0), packets.own(0, 1)); });
    auto const work = packets.start(comm, steps.rule(), policy, false);
    packets.finish();
    workspace.exchange.agree();
    steps.accept(packets.summary(0));
    packets.total(0, steps.totals(all));
    steps.apply(all);
    steps.commit(all, packets.own(0, 0), packets.own(0, 1));
    return;
  }
  own.policy = static_cast<std::int16_t>(policy);
  own.shape = shape_digest(std::array{steps.channels()});
  own.part_channels = parts.channels;
  auto& exchange = workspace.exchange;
  exchange.run(
      comm, own, plan, parts.ahead,
      [&](exchange_part const& part) { steps.local(part.channels, part.first, part.second); },
      [&] { steps.accept(summarize(exchange.headers())); },
      [&](exchange_part const& part, exchange_part const* next) {
        auto const& headers = exchange.headers();
        fold_ranks(
            steps.rule(), headers.size(), [&](std::size_t r) { return headers[r].count; },
            [&](std::size_t r, std::size_t v) { return v == 0 ? part.first_of(r) : part.second_of(r); },
            steps.totals(part.channels));
        if (next != nullptr)
          steps.apply_and_local(part.channels, next->channels, next->first, next->second);
        else
          steps.apply(part.channels);
      });
  for (auto const& part : exchange.parts()) steps.commit(part.channels, part.first, part.second);
}

/// Runs the steps of one layer's pass to the end. Collective unless there is one rank, or the pass is of this rank alone.
template <communicator C>
void run_pass(C const& comm, pass_steps& steps, batch_norm_workspace& workspace, exchange_plan& plan,
              part_choice const& parts) {
  explaining_mismatches([&] { run_steps(comm, steps, workspace, plan, parts); });
}

/// The parts in which this rank would exchange a pass over K micro-batches that reads `tensors` tensors like x twice.
template <communicator C, class T>
[[nodiscard]] part_choice choose_parts(host::executor_ref exec, C const& comm, std::span<tensor_view<T const> const> x,
                                       int tensors, bool failed) {
  if (failed || x.empty()) return {0, false};
  auto all = *std::ranges::max_element(x, {}, &tensor_view<T const>::size);
  all.samples = 0;
  for (auto const& batch : x) all.samples += batch.samples;
  auto const choice = choose_parts(exec, comm, all, tensors);
  // Several are read one after the other, by which time halves have left the cache.
  return choice.ahead && x.size() > 1 ? part_choice{std::numeric_limits<std::int64_t>::max(), false} : choice;
}

} // namespace syncnorm::detail
