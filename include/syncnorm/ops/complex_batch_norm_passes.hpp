#pragma once

#include <complex>
#include <cstdint>
#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/complex_backward_steps.hpp>
#include <syncnorm/ops/detail/complex_forward_steps.hpp>
#include <syncnorm/ops/detail/complex_inference_steps.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/run_pass.hpp>

namespace syncnorm {

namespace detail {

/// A forward pass over complex numbers, by `Steps`, with what it borrows.
template <complex_component T, class Steps>
class planned_complex_forward final : public planned_pass, public in_kept_memory {
public:
  planned_complex_forward(host::executor_ref exec, std::int64_t channels, complex_forward_operands<T> const& in,
                          batch_norm_options const& options, batch_norm_saved& saved)
      : x_(in.x.begin(), in.x.end()), y_(in.y.begin(), in.y.end()), masks_(in.masks.begin(), in.masks.end()),
        steps_{exec, channels, {x_, y_, in.affine, in.running, in.scope, masks_}, options, saved, *buffers_.data()} {}
  pass_steps& steps() override { return steps_; }

private:
  kept_vector<tensor_view<std::complex<T> const>> x_;
  kept_vector<tensor_view<std::complex<T>>> y_;
  kept_vector<batch_norm_mask> masks_;
  host::detail::scratch_lease<pass_buffers> buffers_{1};
  Steps steps_;
};

/// A backward pass over complex numbers, with what it borrows.
template <complex_component T>
class planned_complex_backward final : public planned_pass, public in_kept_memory {
public:
  planned_complex_backward(host::executor_ref exec, std::int64_t channels, complex_backward_operands<T> const& in,
                           batch_norm_saved const& saved, bool exchange)
      : dy_(in.dy.begin(), in.dy.end()), x_(in.x.begin(), in.x.end()), dx_(in.dx.begin(), in.dx.end()),
        masks_(in.masks.begin(), in.masks.end()), steps_{
                                                      exec,  channels, {dy_, x_, dx_, in.affine, in.gradients, masks_},
                                                      saved, exchange, *buffers_.data()} {}
  pass_steps& steps() override { return steps_; }

private:
  kept_vector<tensor_view<std::complex<T> const>> dy_, x_;
  kept_vector<tensor_view<std::complex<T>>> dx_;
  kept_vector<batch_norm_mask> masks_;
  host::detail::scratch_lease<pass_buffers> buffers_{1};
  complex_backward_steps<T> steps_;
};

} // namespace detail

/// Batch normalization of complex numbers over the batch of all ranks, in training:
///
///     mean = Σ x / n,  var = Σ |x − mean|² / n,  y = gamma·(x − mean)/√(var + eps) + beta,  over all ranks' N and S
///     running = (1 − momentum)·running + momentum·(mean, var·n/(n − 1))    or as `options.variance` says
///
/// with var and the running variance real, mean and beta complex, and gamma real or complex; var is that of the real parts and that of the
/// imaginary parts together. K micro-batches share one statistic: x and y are `[N_k, C, S_k]`, parameters and statistics `[C]`, the masks
/// of positions that count `[N_k, S_k]`: none, or one for each. Everything else is as for `batch_norm_forward_batches`; the workspace is
/// one of 2·C channels, as ranks exchange real and imaginary parts, and `saved` has them, `[C, 2]`.
/// Source: what Flax's BatchNorm does of complex numbers, `flax/linen/normalization.py`.
template <complex_component T, communicator C>
void complex_batch_norm_forward(host::executor_ref exec, C const& comm,
                                std::span<tensor_view<std::complex<T> const> const> x,
                                std::span<tensor_view<std::complex<T>> const> y, complex_affine_parameters<T> affine,
                                complex_running_statistics<T> running, batch_norm_options const& options,
                                batch_norm_saved& saved, batch_norm_workspace& workspace,
                                std::span<batch_norm_mask const> masks = {}) {
  auto constexpr scope = statistics_scope::all_ranks;
  detail::or_forget(saved, scope, options.exchange, [&] {
    auto const channels = detail::complex_channels_of({0, workspace.exchange.channels()}).length;
    detail::complex_forward_operands<T> const operands{x, y, affine, running, scope, masks};
    detail::complex_forward_steps<T> steps{exec, channels, operands, options, saved, workspace.buffers};
    auto const parts = detail::choose_complex_parts<C, T>(exec, comm, x, 1, steps.check().failed());
    detail::run_pass(comm, steps, workspace, workspace.forward_plan, parts);
  });
}

/// Gradients of `complex_batch_norm_forward`, and of evaluation, of a real loss L, each ∂L/∂(real part) + i·∂L/∂(imaginary part), as
/// PyTorch has them (JAX has the conjugate):
///
///     sum_dy = Σ dy,  sum_dy_xmu = Σ Re(dy·conj(x − mean))    over all ranks
///     dx = gamma·inv_std·(dy − sum_dy/n − (x − mean)·inv_std²·sum_dy_xmu/n)
///     gradients.gamma += inv_std·sum_dy_xmu,  gradients.beta += sum_dy    over this rank
///
/// A complex gamma makes of dy conj(gamma)·dy, by which dx is what it is with gamma 1; the gradient of gamma is then
/// inv_std·Σ dy·conj(x − mean).
///
/// The micro-batches and masks are those of the forward pass. Everything else is as for `batch_norm_backward_batches`.
template <complex_component T, communicator C>
void complex_batch_norm_backward(host::executor_ref exec, C const& comm,
                                 std::span<tensor_view<std::complex<T> const> const> dy,
                                 std::span<tensor_view<std::complex<T> const> const> x,
                                 std::span<tensor_view<std::complex<T>> const> dx, complex_affine_parameters<T> affine,
                                 batch_norm_saved const& saved, complex_affine_gradients<T> gradients,
                                 batch_norm_backward_options const& options, batch_norm_workspace& workspace,
                                 std::span<batch_norm_mask const> masks = {}) {
  auto const channels = detail::complex_channels_of({0, workspace.exchange.channels()}).length;
  detail::complex_backward_operands<T> const operands{dy, x, dx, affine, gradients, masks};
  detail::complex_backward_steps<T> steps{exec, channels, operands, saved, options.exchange, workspace.buffers};
  auto const parts = detail::choose_complex_parts<C, T>(exec, comm, x, 2, steps.check().failed());
  detail::run_pass(comm, steps, workspace, workspace.backward_plan, parts);
}

} // namespace syncnorm
