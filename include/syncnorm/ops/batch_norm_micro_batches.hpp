#pragma once

#include <span>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/backward_steps.hpp>
#include <syncnorm/ops/detail/forward_steps.hpp>
#include <syncnorm/ops/detail/run_pass.hpp>

namespace syncnorm {

/// `batch_norm_forward` of K micro-batches by one statistic, that of all of them on all ranks: what it would make of their
/// concatenation. Their moments are merged before the one exchange.
///
/// x and y are `[N_k, C, S_k]` for each k < K; N_k and S_k may differ and be zero, and K may differ between ranks and be
/// zero. y[k] may be x[k] or the residual of this k, and overlaps nothing else. `epilogues`: none, or one for each k.
/// Everything else, and what it throws, is as for one batch.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_forward_batches(host::executor_ref exec, C const& comm, std::span<tensor_view<T const> const> x,
                                std::span<tensor_view<T> const> y, affine_parameters<P> affine,
                                running_statistics<P> running, batch_norm_options const& options,
                                batch_norm_saved& saved, batch_norm_workspace& workspace,
                                batch_norm_caller const& caller = {},
                                std::type_identity_t<std::span<batch_norm_epilogue<T> const>> epilogues = {}) {
  auto constexpr scope = statistics_scope::all_ranks;
  detail::or_forget(saved, scope, options.exchange, [&] {
    detail::forward_operands<T, P> const operands{x, y, affine, running, scope, epilogues};
    detail::forward_steps<T, P> steps{exec,  workspace.exchange.channels(), operands, options, saved, workspace.buffers,
                                      caller};
    auto const parts = detail::choose_parts<C, T>(exec, comm, x, 1, steps.check().failed());
    detail::run_pass(comm, steps, workspace, workspace.forward_plan, parts);
  });
}

/// Gradients of `batch_norm_forward_batches`, in one exchange: those of `batch_norm_backward` of the concatenation. dx may be
/// empty, or default views: not needed; dx[k] may be dy[k], x[k] or the residual, of this k alone. `epilogues` are those of the forward pass,
/// `dresidual` the gradients of their residuals, none or one for each k.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_backward_batches(host::executor_ref exec, C const& comm, std::span<tensor_view<T const> const> dy,
                                 std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> dx,
                                 affine_parameters<P> affine, batch_norm_saved const& saved,
                                 affine_gradients<P> gradients, batch_norm_backward_options const& options,
                                 batch_norm_workspace& workspace, batch_norm_caller const& caller = {},
                                 std::type_identity_t<std::span<batch_norm_epilogue<T> const>> epilogues = {},
                                 std::type_identity_t<std::span<tensor_view<T> const>> dresidual = {}) {
  detail::backward_operands<T, P> const operands{dy, x, dx, affine, gradients, epilogues, dresidual};
  detail::backward_steps<T, P> steps{
      exec, workspace.exchange.channels(), operands, saved, options.exchange, workspace.buffers, caller};
  auto const parts = detail::choose_parts<C, T>(exec, comm, x, 2, steps.check().failed());
  detail::run_pass(comm, steps, workspace, workspace.backward_plan, parts);
}

} // namespace syncnorm
