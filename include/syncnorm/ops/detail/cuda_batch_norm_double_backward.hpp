#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/cuda_statistics_pass.hpp>
#include <syncnorm/ops/detail/double_backward_operands.hpp>

namespace syncnorm::cuda::detail {

using syncnorm::detail::double_backward_operands;

/// A double backward pass by the kernels of `Kernels`.
template <class Kernels, class T, class P>
class double_backward_pass final : public second_order_pass {
  using kernels = kernels_of<T, Kernels>;

public:
  /// Borrows everything.
  double_backward_pass(double_backward_operands<T, P> const& in, bool exchange, batch_norm_saved const& saved,
                       batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : second_order_pass{exchange, saved, workspace, caller}, in_{in} {}

  void check(bool, cudaStream_t stream) override {
    auto const channels = workspace_->channels();
    auto const batches = in_.x.size();
    check_caller();
    check_forward(stream);
    check_batches(batches, in_.dy.size(), in_.u.size(), in_.to_dy.size(), in_.to_x.size());
    check_.batches_of(in_.v.size(), batches, "micro-batches of the gradient with respect to dresidual", true);
    check_.batches_of(in_.epilogues.size(), batches, "epilogues", true);
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) check_batch(k, batches);
    syncnorm::detail::check_outputs_apart(check_, in_);
    auto const count = check_.count_of(in_.x);
    check_.own_count(count, saved_->own_count);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.beta, "beta", channels);
    check_.values(in_.a, "the gradient with respect to that of gamma", channels);
    check_.values(in_.b, "the gradient with respect to that of beta", channels);
    check_.values(in_.gamma_gradient, "the gradient of gamma", channels);
    reserve(stream);
    header_ = syncnorm::detail::make_header<T>(name(), channels, count, saved_->exchange, check_);
    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    tensor_view<T const> const none = workspace_->template empty<T>();
    auto const sums_of = [&](tensor_view<T const> const& dy, tensor_view<T const> const& x, std::size_t k,
                             packet_place const& at) {
      kernels::double_backward_reduce(second(k), dy, x, values_of(in_.affine), of_batch(in_.epilogues, k),
                                      saved_->statistics(), header, at, workspace_->work(), workspace_->limits(),
                                      stream);
    };
    if (in_.x.empty()) return sums_of(none, none, 0, own);
    add_packets(packets(), in_.x.size(), own,
                [&](std::size_t k, packet_place const& at) { sums_of(in_.dy[k], in_.x[k], k, at); });
  }

  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const& own, fault_report const& report,
             cudaStream_t stream) override {
    tensor_view<T const> const none = workspace_->template empty<T>();
    auto const gradients = [&](tensor_view<T const> const& dy, tensor_view<T const> const& x, std::size_t k) {
      // What outlives the pass is written once.
      bool const first = k == 0;
      kernels::double_backward_elemt(second(k), dy, x, of_batch(in_.to_dy, k), of_batch(in_.to_x, k),
                                     values_of(in_.affine), of_batch(in_.epilogues, k), saved_->statistics(), all, own,
                                     first ? outputs_of(in_.gamma_gradient) : channel_outputs{},
                                     first ? report : fault_report{}, workspace_->limits(), stream);
    };
    if (in_.x.empty()) gradients(none, none, 0);
    for (std::size_t k = 0; k < in_.x.size(); ++k) gradients(in_.dy[k], in_.x[k], k);
  }

private:
  [[nodiscard]] second_order<T> second(std::size_t k) const {
    return {of_batch(in_.u, k), values_of(in_.a), values_of(in_.b), of_batch(in_.v, k)};
  }

  void check_batch(std::size_t k, std::size_t batches) {
    using syncnorm::detail::batch_name;
    auto const &x = in_.x[k], &dy = in_.dy[k], u = of_batch(in_.u, k), v = of_batch(in_.v, k);
    auto const to_dy = of_batch(in_.to_dy, k), to_x = of_batch(in_.to_x, k);
    auto const epilogue = of_batch(in_.epilogues, k);
    check_.input(x, batch_name{"x", k, batches}, workspace_->channels());
    check_.input_like(dy, batch_name{"dy", k, batches}, x);
    if (u.is_given()) check_.input_like(u, batch_name{"the gradient with respect to dx", k, batches}, x);
    if (v.is_given()) {
      check_.input_like(v, batch_name{"the gradient with respect to dresidual", k, batches}, x);
      check_.require(epilogue.has_residual() || x.size() == 0,
                     [] { return "there is a gradient with respect to dresidual, but no residual"; });
    }
    if (to_dy.is_given()) check_.written(to_dy, batch_name{"the gradient to dy", k, batches}, x);
    if (to_x.is_given()) check_.written(to_x, batch_name{"the gradient to x", k, batches}, x);
    check_.epilogue_of(epilogue, x, k, batches);
    check_.not_exponential(epilogue.activation, "double backward");
  }

  double_backward_operands<T, P> in_;
};

/// `batch_norm_double_backward` by the kernels of `Kernels`.
template <class Kernels, class T, class P, communicator C>
void double_backward(C const& comm, double_backward_operands<T, P> const& in,
                     batch_norm_backward_options const& options, batch_norm_saved const& saved,
                     batch_norm_workspace& workspace, cudaStream_t stream, batch_norm_caller const& caller = {}) {
  double_backward_pass<Kernels, T, P> pass{in, options.exchange, saved, workspace, caller};
  run_pass(comm, pass, stream);
}

} // namespace syncnorm::cuda::detail
