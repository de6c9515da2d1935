#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_packets.hpp>
#include <syncnorm/ops/detail/cuda_report.hpp>
#include <syncnorm/ops/detail/cuda_side_stream.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::cuda {

/// What a forward pass leaves for its backward pass, besides x, on the current device.
class batch_norm_saved {
public:
  explicit batch_norm_saved(std::int64_t channels) : channels_{channels}, memory_{bytes(channels)} {
    statistics_ = in_memory(memory_.data(), channels);
  }
  /// The same in `memory` of `bytes(channels)`, aligned to 16 bytes, which it borrows.
  batch_norm_saved(std::int64_t channels, std::byte* memory)
      : channels_{channels}, statistics_{in_memory(memory, channels)} {}
  [[nodiscard]] static std::size_t bytes(std::int64_t channels) {
    detail::memory_cutter sizes;
    (void)cut(sizes, channels);
    return sizes.used();
  }
  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }

  statistics_scope scope = statistics_scope::all_ranks; ///< of the latest pass that was enqueued
  bool exists = false;                                  ///< there was one
  std::int64_t own_count = -1;                          ///< N·S of that pass's x, of all micro-batches; −1: of any x
  exchange_policy exchange = exchange_policy::automatic; ///< of that pass, and hence of its backward pass
  batch_variance normalized_by = batch_variance::biased;
  std::int64_t passes = 0; ///< that were enqueued so far
  /// mean, inv_std `[C]`, and the count over the scope, −1 where the pass failed, in device memory.
  [[nodiscard]] saved_statistics statistics() const noexcept {
    return {statistics_.mean, statistics_.inv_std, statistics_.count, normalized_by};
  }

private:
  static saved_statistics cut(detail::memory_cutter& cutter, std::int64_t channels) {
    auto const c = static_cast<std::size_t>(channels > 0 ? channels : 0);
    saved_statistics made;
    made.mean = cutter.take<double>(c);
    made.inv_std = cutter.take<double>(c);
    made.count = cutter.take<std::int64_t>(1);
    return made;
  }
  static saved_statistics in_memory(std::byte* memory, std::int64_t channels) {
    detail::memory_cutter cutter{memory};
    return cut(cutter, channels);
  }

  std::int64_t channels_;
  detail::device_memory memory_; // empty where it is borrowed
  saved_statistics statistics_;
};

/// What kernels may use of the current device.
[[nodiscard]] inline device_limits current_limits() {
  int device = 0;
  device_limits limits;
  syncnorm::detail::require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  auto const get = [device](int& value, cudaDeviceAttr attribute) {
    syncnorm::detail::require_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  };
  get(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  get(limits.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int has_clusters = 0, major = 0, minor = 0;
  get(has_clusters, cudaDevAttrClusterLaunch);
  get(major, cudaDevAttrComputeCapabilityMajor);
  get(minor, cudaDevAttrComputeCapabilityMinor);
  limits.cluster_blocks = has_clusters != 0 ? 8 : 1; // as many as any such device allows
  limits.architecture = 100 * major + 10 * minor;
  return limits;
}

/// Buffers of the passes of one layer on the current device, for all shapes and for communicators of `ranks` ranks, and the
/// ranks' standing agreement on the channels. Passes that use it are of one stream at a time; they allocate nothing.
class batch_norm_workspace {
public:
  /// `work_bytes`: of the kernels' workspace, at least `workspace_bytes`. Where forward and backward passes, or double backward passes,
  /// never gather, there is no room for it. Throws invalid_argument_error, cuda_error.
  batch_norm_workspace(std::int64_t channels, int ranks, device_limits const& limits, std::size_t work_bytes,
                       bool gathers = true, bool double_gathers = true)
      : channels_{channels}, ranks_{ranks}, agreed_{ranks == 1}, limits_{limits}, report_{ranks},
        pool_{{channels}, ranks}, packets_{{&channels, 1}, 2, ranks, gathers}, double_gathers_{double_gathers} {
    if (auto const needed = workspace_bytes(channels, limits); work_bytes < needed)
      throw invalid_argument_error{"batch_norm_workspace: the kernels' workspace has " + std::to_string(work_bytes) +
                                   " bytes, expected at least " + std::to_string(needed)};
    syncnorm::detail::require_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    detail::memory_cutter sizes;
    cut(sizes, work_bytes);
    memory_ = detail::device_memory{sizes.used()};
    detail::memory_cutter cutter{memory_.data()};
    cut(cutter, work_bytes);
  }

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] device_limits const& limits() const noexcept { return limits_; }
  [[nodiscard]] workspace const& work() const noexcept { return work_; }
  [[nodiscard]] fault_report report() const { return report_.on_device(); }
  /// A tensor of no elements.
  template <class T>
  [[nodiscard]] tensor_view<T> empty() const {
    return {nullptr, 0, channels_ > 0 ? channels_ : 0, 0};
  }
  /// Of forward and backward passes.
  [[nodiscard]] detail::pass_packets const& packets() const noexcept { return packets_; }
  /// Of double backward passes; empty before `reserve_double_backward`.
  [[nodiscard]] detail::pass_packets const& double_packets() const noexcept { return double_packets_; }
  /// Local; allocates, once.
  void reserve_double_backward() {
    if (!double_packets_.empty()) return;
    detail::device_scope const there{device_};
    double_packets_ = detail::pass_packets{{&channels_, 1}, 7, ranks_, double_gathers_};
  }

  /// Of passes in two phases.
  [[nodiscard]] detail::packet_pool& pool() noexcept { return pool_; }
  [[nodiscard]] detail::pass_report& passes_report() noexcept { return report_; }

  /// f(`stream`), or where that is of another device, on which nothing of the layer's can run, f of a stream of this one in its place. This
  /// device must be current. The first one of the latter kind allocates.
  template <class F>
  void on_own_device(cudaStream_t stream, int device_of_stream, F const& f) {
    if (device_of_stream == device_) return f(stream);
    if (!instead_) instead_ = std::make_unique<detail::side_stream>();
    instead_->run_instead(stream, device_of_stream, f);
  }

  /// Whether the ranks are known to have this number of channels.
  [[nodiscard]] bool agreed() const noexcept { return agreed_; }

  /// Lets the ranks agree on what has to be the same for a pass to be one collective, by headers of fixed size. Collective;
  /// waits for the stream. Throws what `require_agreement` does, on every rank, where one has a fault or they differ.
  template <allgathers_on_stream<std::byte> C>
  void agree(C const& comm, syncnorm::detail::packet_header const& own, cudaStream_t stream) {
    using syncnorm::detail::require_cuda;
    auto const ranks = static_cast<std::size_t>(ranks_);
    std::span<std::byte> const head{heads_, sizeof own}, heads{heads_ + sizeof own, sizeof own * ranks};
    require_cuda(cudaMemcpyAsync(head.data(), &own, sizeof own, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    syncnorm::allgather(comm, head, heads, stream);
    std::vector<syncnorm::detail::packet_header> headers(ranks);
    wait(comm, stream);
    require_cuda(cudaMemcpyAsync(headers.data(), heads.data(), heads.size(), cudaMemcpyDeviceToHost, stream),
                 "cudaMemcpyAsync");
    require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    syncnorm::detail::require_agreement(headers);
    agreed_ = true;
  }

  /// Waits for the stream, as long as the communicator lets it.
  template <communicator C>
  static void wait(C const& comm, cudaStream_t stream) {
    if constexpr (requires { comm.synchronize(stream); })
      comm.synchronize(stream);
    else
      syncnorm::detail::require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  /// Throws what an earlier pass has failed by, as far as it is known.
  void raise() { report_.raise(); }

private:
  void cut(detail::memory_cutter& cutter, std::size_t work_bytes) {
    auto const ranks = static_cast<std::size_t>(ranks_);
    heads_ = cutter.take<std::byte>(sizeof(syncnorm::detail::packet_header) * (1 + ranks));
    work_ = {cutter.take<std::byte>(work_bytes), work_bytes};
  }

  std::int64_t channels_;
  int ranks_;
  bool agreed_;
  int device_ = 0;
  device_limits limits_;
  detail::pass_report report_;
  detail::packet_pool pool_;

  detail::pass_packets packets_, double_packets_;
  bool double_gathers_;
  std::unique_ptr<detail::side_stream> instead_;
  detail::device_memory memory_;
  std::byte* heads_ = nullptr;
  workspace work_;
};

} // namespace syncnorm::cuda
