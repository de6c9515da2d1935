#pragma once

#include <complex>
#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_kernels.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_complex_batch_norm_passes.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/cuda_statistics_pass.hpp>

namespace syncnorm::cuda::detail {

using syncnorm::detail::complex_double_backward_operands;

/// A double backward pass over complex numbers by the kernels of `Kernels`.
template <class Kernels, complex_component T>
class complex_double_backward_pass final : public second_order_pass {
  using kernels = complex_kernels_of<T, Kernels>;
  using number = std::complex<T>;

public:
  /// Borrows everything.
  complex_double_backward_pass(complex_double_backward_operands<T> const& in, bool exchange,
                               batch_norm_saved const& saved, batch_norm_workspace& workspace)
      : second_order_pass{exchange, saved, workspace, {}}, in_{in} {}

  void check(bool, cudaStream_t stream) override {
    auto const components = workspace_->channels(), channels = components / 2;
    auto const batches = in_.x.size();
    check_forward(stream);
    check_batches(batches, in_.dy.size(), in_.second.dx.size(), in_.to_dy.size(), in_.to_x.size());
    check_.batches_of(in_.masks.size(), batches, "masks", true);
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) check_batch(k, batches);
    syncnorm::detail::check_outputs_apart(check_, in_);
    auto const count = check_.count_of(in_.x);
    check_.own_count(count, saved_->own_count);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.gamma_imag, "the imaginary part of gamma", channels);
    check_.values(in_.second.gamma_gradient, "the gradient with respect to that of gamma", channels);
    check_.values(in_.second.gamma_imag_gradient, "the gradient with respect to that of the imaginary part of gamma",
                  channels);
    check_.values(in_.second.beta_gradient, "the gradient with respect to that of beta", channels);
    check_.values(in_.gradients.gamma, "the gradient of gamma", channels);
    check_.values(in_.gradients.gamma_imag, "the gradient of the imaginary part of gamma", channels);
    syncnorm::detail::check_gamma_gradients(check_, in_);
    reserve(stream);
    header_ = syncnorm::detail::make_header<T>(name(), components, count, saved_->exchange, check_);
    syncnorm::detail::name_complex<T>(header_);
    syncnorm::detail::name_complex_gamma(header_, in_.affine);
    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    auto const sums_of = [&](tensor_view<number const> const& dy, tensor_view<number const> const& x, std::size_t k,
                             packet_place const& at) {
      kernels::double_backward_reduce(second(k), dy, x, syncnorm::detail::has_complex_gamma(in_.affine),
                                      of_batch(in_.masks, k), saved_->statistics(), header, at, workspace_->work(),
                                      workspace_->limits(), stream);
    };
    tensor_view<number const> const none = empty_of<T>(*workspace_);
    if (in_.x.empty()) return sums_of(none, none, 0, own);
    add_packets(packets(), in_.x.size(), own,
                [&](std::size_t k, packet_place const& at) { sums_of(in_.dy[k], in_.x[k], k, at); });
  }

  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const& own, fault_report const& report,
             cudaStream_t stream) override {
    auto const gradients = [&](tensor_view<number const> const& dy, tensor_view<number const> const& x, std::size_t k) {
      // What outlives the pass is written once.
      bool const first = k == 0;
      complex_affine_outputs const to{outputs_of(in_.gradients.gamma), {}, outputs_of(in_.gradients.gamma_imag)};
      kernels::double_backward_elemt(second(k), dy, x, of_batch(in_.to_dy, k), of_batch(in_.to_x, k),
                                     values_of(in_.affine), of_batch(in_.masks, k), saved_->statistics(), all, own,
                                     first ? to : complex_affine_outputs{}, first ? report : fault_report{},
                                     workspace_->limits(), stream);
    };
    tensor_view<number const> const none = empty_of<T>(*workspace_);
    if (in_.x.empty()) gradients(none, none, 0);
    for (std::size_t k = 0; k < in_.x.size(); ++k) gradients(in_.dy[k], in_.x[k], k);
  }

private:
  [[nodiscard]] complex_second_order_values<T> second(std::size_t k) const {
    auto const& of = in_.second;
    return {of_batch(of.dx, k), values_of(of.gamma_gradient), component_values_of(of.beta_gradient),
            values_of(of.gamma_imag_gradient)};
  }

  void check_batch(std::size_t k, std::size_t batches) {
    using syncnorm::detail::batch_name;
    auto const &x = in_.x[k], &dy = in_.dy[k], u = of_batch(in_.second.dx, k);
    auto const to_dy = of_batch(in_.to_dy, k), to_x = of_batch(in_.to_x, k);
    check_.input(x, batch_name{"x", k, batches}, workspace_->channels() / 2);
    check_.input_like(dy, batch_name{"dy", k, batches}, x);
    if (u.is_given()) check_.input_like(u, batch_name{"the gradient with respect to dx", k, batches}, x);
    if (to_dy.is_given()) check_.written(to_dy, batch_name{"the gradient to dy", k, batches}, x);
    if (to_x.is_given()) check_.written(to_x, batch_name{"the gradient to x", k, batches}, x);
    check_.mask_of(of_batch(in_.masks, k).mask, x, k, batches);
  }

  complex_double_backward_operands<T> in_;
};

} // namespace syncnorm::cuda::detail
