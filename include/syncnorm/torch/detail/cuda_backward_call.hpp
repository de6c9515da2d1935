#pragma once

#include <string>
#include <utility>

#include <ATen/ATen.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/cuda_batch_norm_backward.hpp>
#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// A backward pass of a module on a CUDA device; types as in `cuda_forward_pass`.
template <class Kernels, communicator C, class T, class P>
class cuda_backward_call final : public prepared_backward_call<T, P> {
  using base = prepared_backward_call<T, P>;
  using element = device_element_t<T>;
  using parameter = device_element_t<P>;

public:
  /// `fault` is what is wrong already.
  cuda_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of, backward_call::tensors dy,
                     wanted_gradients wants, C const& comm, std::string fault)
      : base{std::move(pass), std::move(of), std::move(dy), std::move(wants), std::move(fault)}, comm_{comm} {}

  void run() override {
    at::AutoGradMode const no_recording{false};
    auto& record = static_cast<cuda_record&>(*this->pass_->on_device);
    auto const dy = each_on_device(this->dy_views_), x = each_on_device(this->x_views_);
    auto const dx = each_on_device(this->dx_views_), dresidual = each_on_device(this->dresidual_views());
    auto const epilogues = each_on_device(this->epilogues());
    affine_gradients<parameter> const gradients{on_device(this->gradients_.gamma), on_device(this->gradients_.beta)};
    cuda::detail::backward_operands<element, parameter> const operands{
        dy, x, dx, on_device(this->affine_), gradients, epilogues, dresidual};
    record.buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
      cuda::detail::backward<Kernels, element, parameter>(comm_, operands, {this->pass_->state->exchange_backward},
                                                          record.saved(), workspace, stream,
                                                          {this->fault_, this->differentiable_});
    });
  }

private:
  C const& comm_;
};

} // namespace syncnorm::torch::detail
