#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::cuda::detail {

/// What layers on a device have in common, whatever numbers they take.
template <communicator C>
class device_layer {
public:
  /// Throws what has failed in passes so far, as far as it is known on this rank, and in the communicator. Does not wait.
  void check() {
    workspace_.raise();
    syncnorm::check(comm_);
  }
  /// Waits for the stream, as long as the communicator lets it, and throws what has failed in what was enqueued there, the
  /// same on every rank.
  void synchronize(cudaStream_t stream) {
    batch_norm_workspace::wait(comm_, stream);
    check();
  }

  /// The same on every rank, since evaluation exchanges nothing.
  void train(bool on = true) noexcept { training_ = on; }
  void eval() noexcept { training_ = false; }
  [[nodiscard]] bool is_training() const noexcept { return training_; }
  /// On: training, too, normalizes by the running statistics; as on the host.
  void freeze_statistics(bool on = true) noexcept { frozen_ = on; }
  [[nodiscard]] bool has_frozen_statistics() const noexcept { return frozen_; }

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }
  [[nodiscard]] C const& comm() const noexcept { return comm_; }
  [[nodiscard]] batch_norm_layer_options const& options() const noexcept { return options_; }
  /// Statistics of the latest forward pass, in device memory.
  [[nodiscard]] batch_norm_saved const& saved() const noexcept { return saved_; }

  /// Training batches that the running statistics have seen, in device memory.
  [[nodiscard]] std::int64_t* num_batches_tracked() noexcept { return num_batches_tracked_; }
  [[nodiscard]] std::int64_t const* num_batches_tracked() const noexcept { return num_batches_tracked_; }

protected:
  /// `exchanged`: channels of what ranks exchange.
  device_layer(C comm, std::int64_t channels, std::int64_t exchanged, batch_norm_layer_options const& options,
               device_limits const& limits)
      : comm_{std::move(comm)}, options_{options}, channels_{channels}, saved_{exchanged},
        workspace_{exchanged,
                   syncnorm::size(comm_),
                   limits,
                   workspace_bytes(exchanged, limits),
                   gathers(exchanged, 2),
                   gathers(exchanged, 7)} {
    saved_.exchange = options_.norm.exchange; // lest ranks differ where one lacks a forward pass
  }

  /// Takes the parameters and statistics of `cut(cutter)`, zeroed, and the counter.
  template <class Cut>
  void allocate(Cut const& cut) {
    memory_cutter sizes;
    cut(sizes);
    (void)sizes.take<std::int64_t>(1);
    memory_ = device_memory{sizes.used()};
    memory_cutter cutter{memory_.data()};
    cut(cutter);
    num_batches_tracked_ = cutter.take<std::int64_t>(1);
  }
  [[nodiscard]] std::size_t channel_count() const { return static_cast<std::size_t>(channels_ > 0 ? channels_ : 0); }
  [[nodiscard]] bool has_gamma() const { return options_.affine && options_.parts != affine_parts::beta; }
  [[nodiscard]] bool has_beta() const { return options_.affine && options_.parts != affine_parts::gamma; }

  template <class P>
  static void fill(std::span<P> values, P value) {
    if (values.empty()) return;
    std::vector<P> const filled(values.size(), value);
    copy_to_device(values.data(), filled.data(), values.size_bytes());
  }
  void reset_counter() const {
    std::int64_t const none = 0;
    copy_to_device(num_batches_tracked_, &none, sizeof none);
  }
  template <class P>
  static void zero(std::span<P> values, cudaStream_t stream) {
    if (!values.empty())
      syncnorm::detail::require_cuda(cudaMemsetAsync(values.data(), 0, values.size_bytes(), stream), "cudaMemsetAsync");
  }

  /// `load()` loads kernels.
  template <class Load>
  void reserve_double_backward(Load const& load) {
    device_scope const there{workspace_.device()};
    load();
    workspace_.reserve_double_backward();
  }

  /// `load()` loads kernels; `describe(check)` is the header of a forward pass without a batch, of which `check` says what is wrong.
  template <class Load, class Describe>
  void prepare_passes(cudaStream_t stream, Load const& load, Describe const& describe) {
    device_scope const there{workspace_.device()}; // kernels are loaded on the current one
    if (syncnorm::size(comm_) == 1 || workspace_.agreed()) return load();
    require_capturable(comm_, "batch_norm preparation", false, stream);
    device_check check{workspace_.device()};
    syncnorm::detail::look_into(check, load);
    syncnorm::detail::packet_header own = describe(check);
    own.policy = static_cast<std::int16_t>(resolved(merge_rule::moments));
    workspace_.agree(comm_, own, stream);
    // What a rank gets that runs a pass meanwhile.
    syncnorm::detail::set_text(own.pass, "batch_norm preparation");
    syncnorm::detail::require_cuda(
        cudaMemcpyAsync(workspace_.packets().own_headers().data(), &own, sizeof own, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
    auto const forward = resolved(merge_rule::moments), backward = resolved(merge_rule::sums);
    rehearse_exchange(comm_, workspace_.packets(), merge_rule::moments, forward, stream);
    if (backward == exchange_policy::reduce || backward != forward) // else it is the same allgather
      rehearse_exchange(comm_, workspace_.packets(), merge_rule::sums, backward, stream);
    batch_norm_workspace::wait(comm_, stream);
  }

  /// Of which elements the statistics of a forward pass are.
  [[nodiscard]] statistics_scope scope_of_forward() const {
    bool const by_batch = training_ && !frozen_;
    return by_batch                       ? statistics_scope::all_ranks
           : options_.track_running_stats ? statistics_scope::constant
                                          : statistics_scope::this_rank;
  }
  [[nodiscard]] pending_passes begin(batch_norm_pass pass, cudaStream_t stream) {
    bool agreed = workspace_.agreed();
    return pending_passes::begin(comm_, {&pass, 1}, workspace_.pool(), workspace_.passes_report(), agreed, stream,
                                 syncnorm::detail::pass_form::two_phases);
  }

  C comm_;
  batch_norm_layer_options options_;
  std::int64_t channels_;
  device_memory memory_;
  std::int64_t* num_batches_tracked_ = nullptr;
  bool training_ = true, frozen_ = false;
  batch_norm_saved saved_;
  batch_norm_workspace workspace_;

private:
  /// How the ranks exchange in fact.
  [[nodiscard]] exchange_policy resolved(merge_rule rule) const {
    return resolve_on_stream(options_.norm.exchange, comm_, rule, workspace_.channels());
  }
  [[nodiscard]] bool gathers(std::int64_t exchanged, std::size_t values) const {
    return syncnorm::detail::gathers_on_stream(options_.norm.exchange, comm_, exchanged, values);
  }
};

} // namespace syncnorm::cuda::detail
