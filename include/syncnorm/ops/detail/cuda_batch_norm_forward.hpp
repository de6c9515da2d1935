#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_in_place.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/cuda_statistics_pass.hpp>
#include <syncnorm/ops/detail/shared_in_place.hpp>

namespace syncnorm::cuda::detail {

/// What a forward pass reads and writes: K micro-batches that share one statistic, and the state of the layer.
template <class T, class P>
struct forward_operands {
  std::span<tensor_view<T const> const> x;
  std::span<tensor_view<T> const> y;
  affine_parameters<P> affine;
  running_statistics<P> running;
  statistics_scope scope = statistics_scope::all_ranks;
  std::span<batch_norm_epilogue<T> const> epilogues{};     ///< none, or K
  std::span<batch_norm_kept<T>> kept{};                    ///< none: not in place; or K, where each y is x
  function_ref<void(cudaStream_t)> wait = wait_for_stream; ///< where room has to be made for what is kept
};

/// A forward pass by the kernels of `Kernels`. Its statistics are of all ranks, of this rank, or, where they are constant, the running
/// ones.
template <class Kernels, class T, class P>
class forward_pass final : public saving_pass {
  using kernels = kernels_of<T, Kernels>;

public:
  /// Borrows everything.
  forward_pass(forward_operands<T, P> const& in, batch_norm_options const& options, batch_norm_saved& saved,
               batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : saving_pass{in.scope, options, saved, workspace, caller}, in_{in} {}

  void check(bool alone, cudaStream_t stream) override {
    auto const channels = workspace_->channels();
    auto const batches = in_.x.size();
    using syncnorm::detail::batch_name;
    check_caller();
    check_.require(channels >= 0, [&] { return check_.text("the number of channels is negative: ", channels); });
    check_.place(stream);
    check_.saved(*saved_, channels);
    check_.require(in_.y.size() == batches, [&] {
      return check_.text("there are ", in_.y.size(), " micro-batches of y, expected ", batches, " as of x");
    });
    check_.batches_of(in_.epilogues.size(), batches, "epilogues", true);
    bool masked = false;
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) {
      check_.input(in_.x[k], batch_name{"x", k, batches}, channels);
      check_.written(in_.y[k], batch_name{"y", k, batches}, in_.x[k]);
      check_.epilogue_of(epilogue(k), in_.x[k], k, batches);
      masked |= static_cast<bool>(epilogue(k).mask);
    }
    using syncnorm::detail::named_views;
    if (in_.kept.empty())
      syncnorm::detail::check_output_apart<T>(check_, batches, {"y", in_.y},
                                              {{"x", in_.x}, named_views<T>{in_.epilogues}}, true);
    auto const count = check_.count_of(in_.x);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.beta, "beta", channels);
    check_running(in_.running, channels);
    check_count(alone, masked ? 0 : count);
    if (!in_.kept.empty() && !check_.failed()) {
      auto fault = syncnorm::detail::find_shared_in_place(in_.y, in_.epilogues);
      check_.require(fault.empty(), [&] { return std::move(fault); });
      reserve(stream);
    }
    header_ = syncnorm::detail::make_forward_header<T>(channels, count, in_.affine, in_.running, options_, check_);
    header_.backward = callers_backward();

    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void announce(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    moments_of(workspace_->template empty<T>(), {}, header, own, stream);
  }
  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    if (in_.x.empty()) return announce(header, own, stream);
    keep(stream);
    auto const* const state = kept_state();
    add_packets(packets(), in_.x.size(), own, [&](std::size_t k, packet_place at) {
      at.kept_state = state;
      moments_of(in_.x[k], epilogue(k).mask, header, at, stream);
    });
  }

  void agree_on_group(gathered_headers const& all, fault_report const& report, cudaStream_t stream) override {
    kernels::agree_on_group(all, true, report, stream);
  }
  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const&, fault_report const& report,
             cudaStream_t stream) override {
    save();
    auto const normalize = [&](tensor_view<T const> const& x, tensor_view<T> const& y,
                               batch_norm_epilogue<T> const& done, bool first) {
      // What outlives the pass is written once.
      kernels::normalize(x, y, values_of(in_.affine), done, options_, all, saved_->statistics(),
                         first ? running() : running_outputs{}, first ? report : fault_report{}, workspace_->work(),
                         workspace_->limits(), stream);
    };
    if (in_.x.empty()) normalize(workspace_->template empty<T>(), workspace_->template empty<T>(), {}, true);
    for (std::size_t k = 0; k < in_.x.size(); ++k) normalize(in_.x[k], in_.y[k], epilogue(k), k == 0);
  }

  void run_alone(cudaStream_t stream) override {
    packet_place own{packets().own().data()};
    if (!constant() && in_.x.size() != 1) {
      local(header(), own, stream);
      return apply(own_packet(own), own, workspace_->report(), stream);
    }
    save();
    keep(stream);
    own.kept_state = kept_state();
    if (!constant())
      return kernels::forward_alone(in_.x[0], in_.y[0], values_of(in_.affine), epilogue(0), options_, header(), own,
                                    saved_->statistics(), running(), workspace_->report(), workspace_->work(),
                                    workspace_->limits(), stream);
    auto const mean = values_of(std::span<P const>{in_.running.mean}),
               var = values_of(std::span<P const>{in_.running.var});
    auto const normalize = [&](tensor_view<T const> const& x, tensor_view<T> const& y,
                               batch_norm_epilogue<T> const& done, bool first) {
      kernels::normalize_constant(x, y, values_of(in_.affine), done, options_, mean, var, saved_->statistics(),
                                  own.kept_state, first ? workspace_->report() : fault_report{}, workspace_->limits(),
                                  stream);
    };
    if (in_.x.empty()) normalize(workspace_->template empty<T>(), workspace_->template empty<T>(), {}, true);
    for (std::size_t k = 0; k < in_.x.size(); ++k) normalize(in_.x[k], in_.y[k], epilogue(k), k == 0);
  }

private:
  /// Of the micro-batches in place, whether there is room for what has to be kept of each; null: nothing has.
  [[nodiscard]] std::int64_t const* kept_state() const {
    auto const* const tightest = find_tightest(in_.kept, in_.epilogues);
    return tightest == nullptr ? nullptr : tightest->memory().state;
  }
  [[nodiscard]] batch_norm_epilogue<T> epilogue(std::size_t k) const { return of_batch(in_.epilogues, k); }
  [[nodiscard]] running_outputs running() const {
    return {outputs_of(in_.running.mean), outputs_of(in_.running.var), in_.running.num_batches_tracked};
  }
  void moments_of(tensor_view<T const> const& x, mask_view mask, syncnorm::detail::packet_header const& header,
                  packet_place const& at, cudaStream_t stream) const {
    kernels::local_moments(x, mask, header, at, workspace_->work(), workspace_->limits(), stream);
  }
  /// Makes room for what is kept of each x, where there is none yet.
  void reserve(cudaStream_t stream) {
    for (std::size_t k = 0; k < in_.kept.size() && !check_.failed(); ++k) {
      auto const& x = in_.x[k];
      auto const of = epilogue(k).activation;
      if (x.size() == 0 || in_.kept[k].suits(x.count(), of)) continue;
      check_.require(!is_capturing(stream), [] {
        return "the stream is being captured in a graph before there is memory for what is kept: call "
               "reserve_in_place() first";
      });
      if (check_.failed()) return;
      syncnorm::detail::look_into(
          check_, [&] { in_.kept[k].reserve(x.count(), in_.affine, of, (x.channels + 15) / 16, stream, in_.wait); });
    }
    if (check_.failed()) return;
    for (std::size_t k = 0; k < in_.kept.size(); ++k) {
      auto& kept = in_.kept[k];
      kept.like = in_.x[k];
      kept.like.data = nullptr;
    }
  }
  void keep(cudaStream_t stream) {
    for (std::size_t k = 0; k < in_.kept.size(); ++k)
      if (in_.y[k].size() != 0)
        kernels::keep(in_.y[k], values_of(in_.affine), epilogue(k).activation, in_.kept[k].memory(stream),
                      workspace_->limits(), stream);
  }

  forward_operands<T, P> in_;
};

/// `batch_norm_forward` by the kernels of `Kernels`.
template <class Kernels, class T, class P, communicator C>
void forward(C const& comm, forward_operands<T, P> const& in, batch_norm_options const& options,
             batch_norm_saved& saved, batch_norm_workspace& workspace, cudaStream_t stream,
             batch_norm_caller const& caller = {}) {
  forward_pass<Kernels, T, P> pass{in, options, saved, workspace, caller};
  run_pass(comm, pass, stream);
}

} // namespace syncnorm::cuda::detail
