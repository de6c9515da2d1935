#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/cuda_packets.hpp>
#include <syncnorm/ops/detail/cuda_report.hpp>
#include <syncnorm/ops/passes.hpp>

namespace syncnorm::cuda {

using syncnorm::list_of, syncnorm::passes;

/// Runs passes of several layers on a device in one collective, as `syncnorm::batch_norm_group` does on the host: layers of any
/// channels, element types, shapes and options, whose outputs do not depend on one another.
///
///     cuda::batch_norm_group group{comm};
///     group.run(cuda::passes(first.plan_forward(x, y), second.plan_forward(u, v)), stream);
///
/// All ranks pass the same layers in the same order; the exchange policy is that of the first. The first time for layers of some
/// channels it waits for the stream, for the ranks to agree. What is wrong with one of them on one rank is thrown on every rank, by a
/// later call or by `synchronize`, and then no layer has changed, except layers that need no exchange, in evaluation or with frozen
/// statistics, which may be among them. With one rank, what the device alone finds wrong with a layer, that a mask leaves one value per
/// channel, keeps only that layer as it was.
template <communicator C>
class batch_norm_group {
public:
  explicit batch_norm_group(C comm) : comm_{std::move(comm)} {}

  /// Starts the exchange of all passes, which are either forward or backward passes. Collective; see `pending_passes`, which
  /// the group has to outlive.
  template <list_of<batch_norm_pass> List>
  [[nodiscard]] pending_passes begin(List passes, cudaStream_t stream) {
    std::vector<std::int64_t> channels;
    for (auto const& pass : passes) channels.push_back(pass.steps().workspace().channels());
    auto const found = std::ranges::find(sets_, channels, [](auto const& set) { return set.pool.channels(); });
    auto& set = found != sets_.end() ? *found : sets_.emplace_back(channels, syncnorm::size(comm_));
    return pending_passes::begin(comm_, passes, set.pool, set.report, set.agreed, stream);
  }

  /// The same, to the end.
  template <list_of<batch_norm_pass> List>
  void run(List passes, cudaStream_t stream) {
    begin(std::move(passes), stream).finish(stream);
  }

  /// Throws what has failed in passes so far, as far as it is known on this rank, and in the communicator. Does not wait.
  void check() {
    for (auto& set : sets_) set.report.raise();
    syncnorm::check(comm_);
  }
  /// Waits for the stream, as long as the communicator lets it, and throws what has failed, the same on every rank.
  void synchronize(cudaStream_t stream) {
    batch_norm_workspace::wait(comm_, stream);
    check();
  }

  [[nodiscard]] C const& comm() const noexcept { return comm_; }

private:
  struct layer_set {
    layer_set(std::vector<std::int64_t> const& channels, int ranks)
        : pool{channels, ranks}, report{ranks, static_cast<int>(channels.size())} {}
    detail::packet_pool pool;
    detail::pass_report report;
    bool agreed = false;
  };

  C comm_;
  std::deque<layer_set> sets_; // of layers seen; stay where they are
};

} // namespace syncnorm::cuda
