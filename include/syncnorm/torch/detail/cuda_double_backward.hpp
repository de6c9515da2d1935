#pragma once

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_double_backward.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// Runs the double backward pass of a module on a CUDA device.
template <class Kernels, class T, class P, communicator C>
void run_double_backward(C const& comm, recorded_pass const& pass, double_backward_views<T, P> const& of) {
  using element = device_element_t<T>;
  using parameter = device_element_t<P>;
  auto const dy = each_on_device(of.dy), x = each_on_device(of.x);
  auto const u = each_on_device(of.second.dx), v = each_on_device(of.second.dresidual);
  auto const to_dy = each_on_device(of.to_dy), to_x = each_on_device(of.to_x);
  auto const epilogues = each_on_device(of.epilogues);
  syncnorm::detail::double_backward_operands<element, parameter> const operands{dy,
                                                                                x,
                                                                                u,
                                                                                v,
                                                                                on_device(of.second.gamma_gradient),
                                                                                on_device(of.second.beta_gradient),
                                                                                on_device(of.affine),
                                                                                to_dy,
                                                                                to_x,
                                                                                on_device(of.gamma_gradient),
                                                                                epilogues};
  auto& record = static_cast<cuda_record&>(*pass.on_device);
  record.buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
    record.buffers->template load_double_backward<Kernels, element>();
    cuda::detail::double_backward<Kernels, element, parameter>(comm, operands, {of.exchange}, record.saved(), workspace,
                                                               stream, {.fault = of.fault});
  });
}

} // namespace syncnorm::torch::detail
