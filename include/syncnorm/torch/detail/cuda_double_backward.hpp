#pragma once

#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/cuda_batch_norm_double_backward.hpp>
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
  auto const all = []<class Each>(Each const& each) {
    std::vector<decltype(on_device(each[0]))> made;
    for (auto const& one : each) made.push_back(on_device(one));
    return made;
  };
  auto const dy = all(of.dy), x = all(of.x), u = all(of.second.dx), v = all(of.second.dresidual);
  auto const to_dy = all(of.to_dy), to_x = all(of.to_x);
  auto const epilogues = all(of.epilogues);
  syncnorm::detail::double_backward_operands<element, parameter> const operands{
      dy,
      x,
      u,
      v,
      on_device(of.second.gamma_gradient),
      on_device(of.second.beta_gradient),
      {on_device(of.affine.gamma), on_device(of.affine.beta)},
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
