#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

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
template <class T, class Architectures = detail::architectures>
void double_backward_reduce(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                            saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                            std::byte* packet, workspace const& work, device_limits const& limits,
                            cudaStream_t stream) {
  detail::operand_check const check{"double_backward_reduce"};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  auto const op = detail::make_double_backward_sums(detail::device_view(second.dx), detail::device_view(dy),
                                                    detail::device_view(x), saved, second.gamma_gradient);
  auto const a = detail::make_reduction(op, header, packet, work, limits, op.threads);
  syncnorm::detail::require_cuda(detail::launch_reduction<Architectures>(a, stream), "double_backward_reduce");
}

/// Writes the gradients to dy and x, and adds that to gamma, of which each may be absent. to_dy and to_x are neither each
/// other nor an input.
template <class T, class Architectures = detail::architectures>
void double_backward_elemt(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                           tensor_view<T> to_dy, tensor_view<T> to_x, channel_values const& gamma,
                           saved_statistics const& saved, gathered_packets const& packets, std::byte const* own,
                           channel_outputs const& gamma_gradient, fault_report const& report,
                           device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"double_backward_elemt"};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.optional(to_dy, "the gradient to dy", x);
  check.optional(to_x, "the gradient to x", x);
  check.require(to_dy.data == nullptr || to_dy.data != to_x.data, "the gradients to dy and x are the same memory");
  check.saved(saved, x.channels);
  check.packets(packets);
  check.packet(own);
  detail::double_backward_statistics const statistics{
      packets, own, saved, {gamma, {}}, second.gamma_gradient, second.beta_gradient, gamma_gradient, report};
  auto const op =
      detail::make_double_gradient(detail::device_view(second.dx), detail::device_view(dy), detail::device_view(x),
                                   detail::device_view(to_dy), detail::device_view(to_x), statistics);
  syncnorm::detail::require_cuda(detail::launch_map<Architectures>(detail::make_map(op, limits, op.threads), stream),
                                 "double_backward_elemt");
}

} // namespace syncnorm::cuda
