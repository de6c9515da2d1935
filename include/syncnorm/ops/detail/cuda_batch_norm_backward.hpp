#pragma once

#include <cstddef>
#include <span>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
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

namespace syncnorm::cuda::detail {

/// What a backward pass reads and writes, of the K micro-batches of its forward pass.
template <class T, class P>
struct backward_operands {
  std::span<tensor_view<T const> const> dy, x;
  std::span<tensor_view<T> const> dx; ///< none, or K; default views: not needed
  affine_parameters<P> affine;
  affine_gradients<P> gradients;
  std::span<batch_norm_epilogue<T> const> epilogues{}; ///< none, or K
  std::span<tensor_view<T> const> dresidual{};         ///< as dx
  std::span<batch_norm_kept<T>> kept{};                ///< of each x of a forward pass in place; else none
  std::span<tensor_view<T> const> y{};                 ///< of that, which is x
};

/// A backward pass by the kernels of `Kernels`.
template <class Kernels, class T, class P>
class backward_pass final : public following_pass {
  using kernels = kernels_of<T, Kernels>;

public:
  /// Borrows everything.
  backward_pass(backward_operands<T, P> const& in, bool exchange, batch_norm_saved const& saved,
                batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : following_pass{exchange, saved, workspace, caller}, in_{in} {}

  void check(bool, cudaStream_t stream) override {
    auto const channels = workspace_->channels();
    auto const batches = in_.x.size();
    using syncnorm::detail::batch_name;
    check_caller();
    check_forward(stream);
    check_.require(in_.y.size() == in_.kept.size(), [&] {
      return check_.text("there are ", in_.y.size(), " micro-batches of y, expected ", in_.kept.size(),
                         " as of the forward pass in place");
    });
    for (std::size_t k = 0; k < in_.y.size() && !check_.failed(); ++k)
      check_.same_extents(in_.y[k], batch_name{"y", k, in_.y.size()}, in_.kept[k].like);
    check_.batches_of(in_.dy.size(), batches, "micro-batches of dy", false);
    check_.batches_of(in_.dx.size(), batches, "micro-batches of dx", true);
    check_.batches_of(in_.epilogues.size(), batches, "epilogues", true);
    check_.batches_of(in_.dresidual.size(), batches, "micro-batches of dresidual", true);
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) {
      auto const& x = in_.x[k];
      check_.input(x, batch_name{"x", k, batches}, channels);
      check_.input_like(in_.dy[k], batch_name{"dy", k, batches}, x);
      if (dx(k).is_given()) check_.written(dx(k), batch_name{"dx", k, batches}, x);
      check_.epilogue_of(epilogue(k), x, k, batches);
      if (dresidual(k).is_given()) {
        check_.require(epilogue(k).has_residual() || x.size() == 0,
                       [] { return "the gradient of a residual is asked for, but there is no residual"; });
        check_.written(dresidual(k), batch_name{"dresidual", k, batches}, x);
      }
    }
    using syncnorm::detail::named_views;
    syncnorm::detail::check_outputs_apart<T>(check_, batches, {"dx", in_.dx}, {"dresidual", in_.dresidual},
                                             {{"dy", in_.dy}, {"x", in_.x}, named_views<T>{in_.epilogues}}, true);
    auto const count = check_.count_of(in_.x);
    check_.own_count(count, saved_->own_count);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.beta, "beta", channels);
    check_.values(in_.gradients.gamma, "the gradient of gamma", channels);
    check_.values(in_.gradients.beta, "the gradient of beta", channels);
    header_ = syncnorm::detail::make_header<T>(name(), channels, count, saved_->exchange, check_);
    header_.backward = callers_backward();
    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void announce(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    tensor_view<T const> const none = workspace_->template empty<T>();
    sums_of(none, none, {}, header, own, stream);
  }
  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    if (in_.x.empty()) return announce(header, own, stream);
    recover(stream);
    add_packets(packets(), in_.x.size(), own, [&](std::size_t k, packet_place const& at) {
      sums_of(in_.dy[k], in_.x[k], epilogue(k), header, at, stream);
    });
  }

  void agree_on_group(gathered_headers const& all, fault_report const& report, cudaStream_t stream) override {
    kernels::agree_on_group(all, false, report, stream);
  }
  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const& own, fault_report const& report,
             cudaStream_t stream) override {
    auto const gradient = [&](tensor_view<T const> const& dy, tensor_view<T const> const& x, tensor_view<T> const& to,
                              tensor_view<T> const& to_residual, batch_norm_epilogue<T> const& done, bool first) {
      // What outlives the pass is written once.
      kernels::backward_elemt(dy, x, to, to_residual, values_of(in_.affine), done, saved_->statistics(), all, own,
                              first ? outputs() : affine_outputs{}, first ? report : fault_report{},
                              workspace_->limits(), stream);
    };
    tensor_view<T const> const none = workspace_->template empty<T>();
    if (in_.x.empty()) gradient(none, none, {}, {}, {}, true);
    for (std::size_t k = 0; k < in_.x.size(); ++k)
      gradient(in_.dy[k], in_.x[k], dx(k), dresidual(k), epilogue(k), k == 0);
  }

  void run_alone(cudaStream_t stream) override {
    packet_place const own{packets().own().data()};
    bool const needs_no_sums =
        saved_->scope == statistics_scope::constant && in_.gradients.gamma.empty() && in_.gradients.beta.empty();
    if (needs_no_sums && in_.kept.empty()) return run_constant(stream);
    if (needs_no_sums) { // of a forward pass that may have failed on the device
      recover(stream);
      announce(header(), own, stream);
      return apply(own_packet(own), own, workspace_->report(), stream);
    }
    if (in_.x.size() != 1) {
      local(header(), own, stream);
      return apply(own_packet(own), own, workspace_->report(), stream);
    }
    recover(stream);
    kernels::backward_alone(in_.dy[0], in_.x[0], dx(0), dresidual(0), values_of(in_.affine), epilogue(0),
                            saved_->statistics(), header(), own, outputs(), workspace_->report(), workspace_->work(),
                            workspace_->limits(), stream);
  }

private:
  [[nodiscard]] tensor_view<T> dx(std::size_t k) const { return of_batch(in_.dx, k); }
  [[nodiscard]] tensor_view<T> dresidual(std::size_t k) const { return of_batch(in_.dresidual, k); }
  [[nodiscard]] batch_norm_epilogue<T> epilogue(std::size_t k) const { return of_batch(in_.epilogues, k); }
  void sums_of(tensor_view<T const> const& dy, tensor_view<T const> const& x, batch_norm_epilogue<T> const& done,
               syncnorm::detail::packet_header const& header, packet_place const& at, cudaStream_t stream) const {
    kernels::backward_reduce(dy, x, values_of(in_.affine), done, saved_->statistics(), header, at, workspace_->work(),
                             workspace_->limits(), stream);
  }
  void run_constant(cudaStream_t stream) const {
    for (std::size_t k = 0; k < in_.x.size(); ++k)
      kernels::backward_constant(in_.dy[k], in_.x[k], dx(k), dresidual(k), values_of(in_.affine), epilogue(k),
                                 saved_->statistics(), workspace_->limits(), stream);
  }
  [[nodiscard]] affine_outputs outputs() const {
    return {outputs_of(in_.gradients.gamma), outputs_of(in_.gradients.beta)};
  }
  /// Makes each y of a pass in place x again, unless it is so already, as only the device knows: graphs may have either pass.
  void recover(cudaStream_t stream) {
    for (std::size_t k = 0; k < in_.kept.size(); ++k) {
      if (in_.y[k].size() == 0) continue;
      kernels::recover(in_.y[k], epilogue(k), values_of(in_.affine), saved_->statistics(), in_.kept[k].memory(stream),
                       workspace_->limits(), stream);
    }
  }

  backward_operands<T, P> in_;
};

/// `batch_norm_backward` by the kernels of `Kernels`.
template <class Kernels, class T, class P, communicator C>
void backward(C const& comm, backward_operands<T, P> const& in, batch_norm_backward_options const& options,
              batch_norm_saved const& saved, batch_norm_workspace& workspace, cudaStream_t stream,
              batch_norm_caller const& caller = {}) {
  backward_pass<Kernels, T, P> pass{in, options.exchange, saved, workspace, caller};
  run_pass(comm, pass, stream);
}

} // namespace syncnorm::cuda::detail
