#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The members of kernels_of for double backward passes.
namespace syncnorm::cuda {

template <class T, class Kernels>
void kernels_of<T, Kernels>::double_backward_reduce(second_order<T> const& second, in dy, in x,
                                                    affine_values const& affine, epilogue const& done,
                                                    saved_statistics const& saved, header const& own,
                                                    packet_place const& packet, workspace const& work,
                                                    device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "double_backward_reduce";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.epilogue(done, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::with_epilogue(done, [&](auto has_epilogue) {
    auto const op = detail::make_double_backward_sums<detail::device_element_t<T>, has_epilogue()>(
        detail::device_view(second.dx), detail::device_view(dy), detail::device_view(x), affine,
        detail::device_epilogue(done), saved, second.gamma_gradient);
    detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
  });
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::double_backward_elemt(second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                                   affine_values const& affine, epilogue const& done,
                                                   saved_statistics const& saved, gathered_packets const& packets,
                                                   packet_place const& own, channel_outputs const& gamma_gradient,
                                                   fault_report const& report, device_limits const& limits,
                                                   cudaStream_t stream) {
  auto const* const call = "double_backward_elemt";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.optional(second.dresidual, "the gradient with respect to dresidual", x);
  check.require(second.dresidual.data == nullptr || done.has_residual() || x.size() == 0,
                "there is a gradient with respect to dresidual, but no residual");
  check.optional(to_dy, "the gradient to dy", x);
  check.optional(to_x, "the gradient to x", x);
  check.apart(to_dy, to_x, "the gradients to dy and x are the same memory");
  check.epilogue(done, x);
  check.saved(saved, x.channels);
  check.packets(packets);
  check.packet(own);
  detail::double_backward_statistics const statistics{
      packets, own, saved, affine, second.gamma_gradient, second.beta_gradient, gamma_gradient, report};
  detail::with_epilogue(done, [&](auto has_epilogue) {
    auto const op = detail::make_double_gradient<detail::device_element_t<T>, has_epilogue()>(
        detail::device_view(second.dx), detail::device_view(second.dresidual), detail::device_view(dy),
        detail::device_view(x), detail::device_view(to_dy), detail::device_view(to_x), detail::device_epilogue(done),
        statistics);
    detail::launch_map<Kernels>(call, op, limits, stream);
  });
}

} // namespace syncnorm::cuda
