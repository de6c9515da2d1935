#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

// Double backward as kernels on a stream, by the formulae of ops/batch_norm_double_backward.hpp; see forward.cuh.
namespace syncnorm::cuda {

/// The gradients with respect to what a backward pass gave: dx `[N, C, S]`, and this rank's gradients of gamma and beta.
/// Absent ones stand for 0.
template <class T>
struct second_order {
  tensor_view<T const> dx{};
  channel_values gamma_gradient{}, beta_gradient{};
};

/// Writes the packet of this rank, of seven values a channel: `packet_bytes(C, 7)`.
template <class T>
void double_backward_reduce(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                            saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                            std::byte* packet, workspace const& work, device_limits const& limits, cudaStream_t stream);

/// Writes the gradients to dy and x, and adds that to gamma, of which each may be absent. to_dy and to_x are neither each
/// other nor an input.
template <class T>
void double_backward_elemt(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                           tensor_view<T> to_dy, tensor_view<T> to_x, channel_values const& gamma,
                           saved_statistics const& saved, gathered_packets const& packets, std::byte const* own,
                           channel_outputs const& gamma_gradient, fault_report const& report,
                           device_limits const& limits, cudaStream_t stream);

} // namespace syncnorm::cuda
