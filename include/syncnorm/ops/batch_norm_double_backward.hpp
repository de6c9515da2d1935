#pragma once

#include <span>
#include <type_traits>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/double_backward.hpp>

namespace syncnorm {

/// The gradients of `batch_norm_backward`'s results with respect to what it read: double backward, as a gradient penalty
/// needs. With r = inv_std, x̂ = (x − mean)·r, n the count of all ranks, k = n or by the unbiased variance n − 1, u and v the
/// gradients with respect to dx and dresidual, and a, b those with respect to this rank's gradients of gamma and beta, all of a
/// channel; with m = 1 where a position counts and 0 elsewhere, w = m where outputs that do not count are 0 and else 1, and
/// g = w·f′·dy,
///
///     Sg = Σ g,  Sgx = Σ g·x̂,  Su = Σ m·u,  Sux = Σ m·u·x̂,  Sug = Σ u·g,  Ag = Σ a·g,  Agx = Σ a·g·x̂    over all ranks
///     to dy:     w·f′·(γr·(u − Su/n − x̂·Sux/k) + a·x̂ + b + v)
///     to x:      a·r·g − γr²/k·(Sgx·m·u + Sux·g)
///                + m·(γr²/(n·k)·(Su·Sgx + Sg·Sux) − r·Ag/n − x̂·r/k·(Agx + γr·(Sug − Su·Sg/n − 3·Sux·Sgx/k)))
///     to gamma:  r·Σ (u·g − m·u·(Sg/n + x̂·Sgx/k))    over this rank, added to `gamma_gradient`
///
/// They follow from dx = γr·(g − m·(Sg/n + x̂·Sgx/k)) by ∂r/∂x_j = −r²·m_j·x̂_j/k and ∂x̂_i/∂x_j = r·(δ_ij − m_j/n −
/// m_j·x̂_i·x̂_j/k); f is linear in pieces, so f′ has no derivative, and nothing goes to beta or the residual. By constant
/// statistics: w·f′·(γr·u + a·x̂ + b + v) to dy, a·r·g to x, and r·Σ u·g to gamma.
///
/// dy, x, to_dy and to_x `[N, C, S]`; to_dy and to_x are neither each other nor an input, and a default one is not needed.
/// `epilogue` is that of the forward pass, which may not be exponential. After a pass in place, x is that which the backward pass has
/// restored. Collective, one exchange, on every rank of the backward pass and with the same options. On an error, which every rank throws,
/// `gamma_gradient` is unchanged. Throws invalid_argument_error, mismatch_error, communicator_error.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_double_backward(host::executor_ref exec, C const& comm, batch_norm_second_order<T, P> const& second,
                                std::type_identity_t<tensor_view<T const>> dy,
                                std::type_identity_t<tensor_view<T const>> x,
                                std::type_identity_t<affine_parameters<P>> affine, batch_norm_saved const& saved,
                                tensor_view<T> to_dy, tensor_view<T> to_x,
                                std::type_identity_t<std::span<P>> gamma_gradient,
                                batch_norm_backward_options const& options, batch_norm_workspace& workspace,
                                batch_norm_caller const& caller = {},
                                std::type_identity_t<batch_norm_epilogue<T>> const& epilogue = {}) {
  detail::double_backward<T, P>{exec,
                                workspace.double_packets.channels().front(),
                                {{&dy, 1},
                                 {&x, 1},
                                 {&second.dx, 1},
                                 {&second.dresidual, 1},
                                 second.gamma_gradient,
                                 second.beta_gradient,
                                 affine,
                                 {&to_dy, 1},
                                 {&to_x, 1},
                                 gamma_gradient,
                                 {&epilogue, 1}},
                                saved,
                                caller}
      .run(comm, options.exchange, workspace);
}

/// The same with a workspace of its own.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_double_backward(host::executor_ref exec, C const& comm, batch_norm_second_order<T, P> const& second,
                                std::type_identity_t<tensor_view<T const>> dy,
                                std::type_identity_t<tensor_view<T const>> x,
                                std::type_identity_t<affine_parameters<P>> affine, batch_norm_saved const& saved,
                                tensor_view<T> to_dy, tensor_view<T> to_x,
                                std::type_identity_t<std::span<P>> gamma_gradient = {},
                                batch_norm_backward_options const& options = {},
                                std::type_identity_t<batch_norm_epilogue<T>> const& epilogue = {}) {
  batch_norm_workspace workspace{x.channels};
  batch_norm_double_backward<T, P>(exec, comm, second, dy, x, affine, saved, to_dy, to_x, gamma_gradient, options,
                                   workspace, {}, epilogue);
}

/// `batch_norm_double_backward` of `batch_norm_backward_batches`: that of the concatenation of the K micro-batches. to_dy and
/// to_x are none, or one for each.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_double_backward_batches(
    host::executor_ref exec, C const& comm, batch_norm_second_order_batches<T, P> const& second,
    std::span<tensor_view<T const> const> dy, std::span<tensor_view<T const> const> x, affine_parameters<P> affine,
    batch_norm_saved const& saved, std::span<tensor_view<T> const> to_dy, std::span<tensor_view<T> const> to_x,
    std::span<P> gamma_gradient, batch_norm_backward_options const& options, batch_norm_workspace& workspace,
    batch_norm_caller const& caller = {}, std::span<batch_norm_epilogue<T> const> epilogues = {}) {
  detail::double_backward<T, P>{exec,
                                workspace.double_packets.channels().front(),
                                {dy, x, second.dx, second.dresidual, second.gamma_gradient, second.beta_gradient,
                                 affine, to_dy, to_x, gamma_gradient, epilogues},
                                saved,
                                caller}
      .run(comm, options.exchange, workspace);
}

} // namespace syncnorm
