#pragma once

#include <cstddef>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// Double backward as kernels on a stream, by the formulae of ops/batch_norm_double_backward.hpp; see forward.cuh.
namespace syncnorm::cuda {

/// Writes the packet of this rank, of seven values a channel: `packet_bytes(C, 7)`. `epilogue` is that of the forward pass.
template <class T, class Architectures = detail::architectures>
void double_backward_reduce(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                            affine_values const& affine, batch_norm_epilogue<T> const& epilogue,
                            saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                            packet_place const& packet, workspace const& work, device_limits const& limits,
                            cudaStream_t stream) {
  detail::operand_check const check{"double_backward_reduce"};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.epilogue(epilogue, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  auto const run = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
    using D = detail::device_element_t<T>;
    auto const op = detail::make_double_backward_sums<D, Epilogue>(
        detail::device_view(second.dx), detail::device_view(dy), detail::device_view(x), affine,
        detail::device_epilogue(epilogue), saved, second.gamma_gradient);
    return detail::launch_reduction<Architectures>(detail::make_reduction(op, header, packet, work, limits, op.threads),
                                                   stream);
  };
  syncnorm::detail::require_cuda(epilogue.does_something() ? run(std::true_type{}) : run(std::false_type{}),
                                 "double_backward_reduce");
}

/// Writes the gradients to dy and x, and adds that to gamma, of which each may be absent. to_dy and to_x are neither each
/// other nor an input.
template <class T, class Architectures = detail::architectures>
void double_backward_elemt(second_order<T> const& second, tensor_view<T const> dy, tensor_view<T const> x,
                           tensor_view<T> to_dy, tensor_view<T> to_x, affine_values const& affine,
                           batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                           gathered_packets const& packets, packet_place const& own,
                           channel_outputs const& gamma_gradient, fault_report const& report,
                           device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"double_backward_elemt"};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.optional(second.dresidual, "the gradient with respect to dresidual", x);
  check.require(second.dresidual.data == nullptr || epilogue.has_residual(),
                "there is a gradient with respect to dresidual, but no residual");
  check.optional(to_dy, "the gradient to dy", x);
  check.optional(to_x, "the gradient to x", x);
  check.require(to_dy.data == nullptr || to_dy.data != to_x.data, "the gradients to dy and x are the same memory");
  check.epilogue(epilogue, x);
  check.saved(saved, x.channels);
  check.packets(packets);
  check.packet(own);
  detail::double_backward_statistics const statistics{
      packets, own, saved, affine, second.gamma_gradient, second.beta_gradient, gamma_gradient, report};
  auto const run = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
    using D = detail::device_element_t<T>;
    auto const op = detail::make_double_gradient<D, Epilogue>(
        detail::device_view(second.dx), detail::device_view(second.dresidual), detail::device_view(dy),
        detail::device_view(x), detail::device_view(to_dy), detail::device_view(to_x),
        detail::device_epilogue(epilogue), statistics);
    return detail::launch_map<Architectures>(detail::make_map(op, limits, op.threads), stream);
  };
  syncnorm::detail::require_cuda(epilogue.does_something() ? run(std::true_type{}) : run(std::false_type{}),
                                 "double_backward_elemt");
}

} // namespace syncnorm::cuda
