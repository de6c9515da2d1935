#pragma once

#include <complex>
#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/complex_double_backward.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>

namespace syncnorm {

/// The gradients of `complex_batch_norm_backward`'s results with respect to what it read: double backward. All are of a real loss, each
/// ∂L/∂(real part) + i·∂L/∂(imaginary part). With r = inv_std, x̂ = (x − mean)·r, n the count of all ranks, k = n or by the unbiased
/// variance n − 1, u the gradient with respect to dx, and a, b those with respect to this rank's gradients of gamma and beta, all of a
/// channel; with m = 1 where a position counts and 0 elsewhere, w = m where outputs that do not count are 0 and else 1,
/// g = w·conj(gamma)·dy, h = w·conj(a)·dy and ⟨p, q⟩ = Σ Re(p·conj(q)),
///
///     Sg = Σ g,  Sgx = ⟨g, x̂⟩,  Su = Σ m·u,  Sux = ⟨m·u, x̂⟩,  Sug = ⟨u, g⟩,  Sh = Σ h,  Shx = ⟨h, x̂⟩    over all ranks
///     to dy:     w·(gamma·r·(u − Su/n − x̂·Sux/k) + a·x̂ + b)
///     to x:      r·h − r²/k·(Sgx·m·u + Sux·g)
///                + m·(r²/(n·k)·(Su·Sgx + Sg·Sux) − r·Sh/n − x̂·r/k·(Shx + r·(Sug − Re(conj(Su)·Sg)/n − 3·Sux·Sgx/k)))
///     to gamma:  r·(Σ w·dy·conj(u) − conj(Σ m·u)·Sdy/n − ⟨m·u, x̂⟩·Sdx/k)    with sums of u over this rank, and
///                Sdy = Σ w·dy,  Sdx = Σ w·dy·conj(x̂)    over all; of a real gamma the real part
///
/// They follow as those of `batch_norm_double_backward`, of which a complex number is two elements that share one variance. By constant
/// statistics: w·(gamma·r·u + a·x̂ + b) to dy, r·h to x, and r·Σ w·dy·conj(u) to gamma.
///
/// dy, x, to_dy and to_x are K micro-batches `[N_k, C, S_k]`, and to_dy and to_x none, or one for each; they are neither each other nor
/// an input, and a default one is not needed. Adds to `gradients.gamma` and `gamma_imag`, and to no others. Collective, one exchange, on
/// every rank of the backward pass and with the same options. On an error, which every rank throws, `gradients` are unchanged. Throws
/// invalid_argument_error, mismatch_error, communicator_error.
template <complex_component T, communicator C>
void complex_batch_norm_double_backward(host::executor_ref exec, C const& comm, complex_second_order<T> const& second,
                                        std::span<tensor_view<std::complex<T> const> const> dy,
                                        std::span<tensor_view<std::complex<T> const> const> x,
                                        complex_affine_parameters<T> affine, batch_norm_saved const& saved,
                                        std::span<tensor_view<std::complex<T>> const> to_dy,
                                        std::span<tensor_view<std::complex<T>> const> to_x,
                                        complex_affine_gradients<T> gradients,
                                        batch_norm_backward_options const& options, batch_norm_workspace& workspace,
                                        std::span<batch_norm_mask const> masks = {}) {
  auto const channels = detail::complex_channels_of({0, workspace.double_packets.channels().front()}).length;
  detail::complex_double_backward<T>{exec, channels, {dy, x, second, affine, to_dy, to_x, gradients, masks}, saved}.run(
      comm, options.exchange, workspace);
}

} // namespace syncnorm
