#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

// The backward pass as kernels on a stream; see forward.cuh.
namespace syncnorm::cuda {

/// Writes the packet of this rank: `header`, and of each channel
///
///     sum_dy = Σ dv,  sum_dy_xmu = Σ dv·(x − mean),  dv = dy·f′(gamma·(x − mean)·inv_std + beta + residual)
///
/// where dv is 0 where the mask makes the output 0. If the forward pass failed, saved.count = −1, the packet gets a fault.
/// dy, x and the residual `[N, C, S]`, the mask `[N, S]`.
template <class T>
void backward_reduce(tensor_view<T const> dy, tensor_view<T const> x, affine_values const& affine,
                     batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                     syncnorm::detail::packet_header const& header, std::byte* packet, workspace const& work,
                     device_limits const& limits, cudaStream_t stream);

/// Adds the packets in rank order, adds inv_std·sum_dy_xmu and sum_dy of `own`, this rank's packet, to the gradients of
/// gamma and beta, and writes, of all ranks' sums and saved.count,
///
///     dresidual = dv,  dx = gamma·inv_std·(dv − m·(sum_dy/count + (x − mean)·inv_std²·sum_dy_xmu/count))
///
/// where m is 1 at positions that count and 0 elsewhere; dx = gamma·inv_std·dv where the count is 0. Without exchange,
/// `packets` is `own` alone. A default dx or dresidual is not needed; each may be dy, x or the residual, but not the other.
/// Where packets disagree or have a fault it writes `report` and nothing else.
template <class T>
void backward_elemt(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx, tensor_view<T> dresidual,
                    affine_values const& affine, batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                    gathered_packets const& packets, std::byte const* own, affine_outputs const& gradients,
                    fault_report const& report, device_limits const& limits, cudaStream_t stream);

} // namespace syncnorm::cuda
