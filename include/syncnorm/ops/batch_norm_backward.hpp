#pragma once

#include <array>
#include <span>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>

namespace syncnorm {

/// Gradients of `batch_norm_forward` and `batch_norm_inference`:
///
///     sum_dy = Σ dy,  sum_dy_xmu = Σ dy·(x − mean)    over all ranks
///     dx = gamma·inv_std·(dy − sum_dy/n − (x − mean)·inv_std²·sum_dy_xmu/n)
///     gradients.gamma += inv_std·sum_dy_xmu,  gradients.beta += sum_dy    over this rank, as of any other parameter
///
/// where by the unbiased variance, `saved.normalized_by`, sum_dy_xmu is divided by n − 1.
/// dy, x, dx `[N, C, S]`; dx may be dy or x. A default `tensor_view` for dx and empty spans for the gradients of gamma
/// and beta: not needed. Collective, whatever gradients this rank needs: one
/// allgather, several for a large tensor, or one allreduce, as the forward pass; unless there is one rank, the
/// statistics are not of all ranks, or the options switch the exchange off. On an error, which every rank throws, the
/// gradients of gamma and beta are unchanged. The epilogue, gamma and beta are those of the forward pass, and `dresidual`,
/// `[N, C, S]` or a default view, is where the gradient of its residual goes; dx, too, may be the residual, and `dresidual` dy or x.
/// Otherwise neither output may overlap these, nor the other one. Throws invalid_argument_error, mismatch_error, communicator_error.
template <class X, class P = accumulate_t<X>, communicator C>
void batch_norm_backward(host::executor_ref exec, C const& comm, tensor_view<X> dy,
                         std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx, affine_parameters<P> affine,
                         batch_norm_saved const& saved, affine_gradients<P> gradients,
                         batch_norm_backward_options const& options, batch_norm_workspace& workspace,
                         batch_norm_caller const& caller = {},
                         batch_norm_epilogue<std::remove_const_t<X>> const& epilogue = {},
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dresidual = {}) {
  using T = std::remove_const_t<X>;
  std::array const dxs{dx};
  batch_norm_backward_batches<T, P>(exec, comm, std::array<tensor_view<T const>, 1>{dy},
                                    std::array<tensor_view<T const>, 1>{x}, std::span{dxs}.first(dx.is_given() ? 1 : 0),
                                    affine, saved, gradients, options, workspace, caller, std::span{&epilogue, 1},
                                    std::span<tensor_view<T> const>{&dresidual, 1});
}

/// The same with a workspace of its own.
template <class X, class P = accumulate_t<X>, communicator C>
void batch_norm_backward(host::executor_ref exec, C const& comm, tensor_view<X> dy,
                         std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx, affine_parameters<P> affine,
                         batch_norm_saved const& saved, affine_gradients<P> gradients = {},
                         batch_norm_backward_options const& options = {},
                         batch_norm_epilogue<std::remove_const_t<X>> const& epilogue = {},
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dresidual = {}) {
  batch_norm_workspace workspace{x.channels};
  batch_norm_backward<X, P>(exec, comm, dy, x, dx, affine, saved, gradients, options, workspace, {}, epilogue,
                            dresidual);
}

} // namespace syncnorm
