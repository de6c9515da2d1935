#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/cuda_batch_norm_backward.hpp>
#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/cuda_forward_pass.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch::detail {

/// A backward pass of a module on a CUDA device; types as in `cuda_forward_pass`.
template <class Kernels, communicator C, class T, class P>
class cuda_backward_call final : public backward_call {
  using element = device_element_t<T>;
  using parameter = device_element_t<P>;

public:
  /// `fault` is what is wrong already.
  cuda_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of, at::Tensor dy, wanted_gradients wants,
                     C const& comm, std::string fault)
      : backward_call{std::move(pass), std::move(of), std::move(dy), wants}, comm_{comm}, fault_{std::move(fault)} {
    bool const recorded = at::GradMode::is_enabled() && wants_.any();
    differentiable_ = recorded ? backward_pass::needed : backward_pass::impossible;
    if (fault_.empty()) fault_ = find_gradient_fault(dy_, recorded);
    at::AutoGradMode const no_recording{false};
    try {
      if (fault_.empty()) take();
    } catch (std::exception const& e) {
      fault_ = text_of(e);
    }
  }

  void run() override {
    at::AutoGradMode const no_recording{false};
    auto& record = static_cast<cuda_record&>(*pass_->on_device);
    auto const dy = on_device(dy_view_), x = on_device(x_view_);
    auto const dx = on_device(dx_view_), dresidual = on_device(dresidual_view_);
    auto const epilogue = on_device(epilogue_);
    cuda::detail::backward_operands<element, parameter> const operands{
        {&dy, 1}, {&x, 1}, {&dx, 1}, affine_, gradients_, {&epilogue, 1}, {&dresidual, 1}};
    record.buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
      cuda::detail::backward<Kernels, element, parameter>(comm_, operands, {pass_->state->exchange_backward},
                                                          record.saved(), workspace, stream, {fault_, differentiable_});
    });
  }

private:
  void take() {
    auto const of_x = make_operands<T>(of_.x);
    read_x_ = of_x.x, read_dy_ = dy_, read_residual_ = of_.residual; // which may become copies
    x_view_ = of_x.x_view;
    dy_view_ = make_companion<T>(read_dy_, of_x);
    if (wants_.x) dx_ = of_x.y, dx_view_ = of_x.y_view;
    if (of_.weight.defined()) affine_.gamma = on_device(values_of<P>(gamma_ = of_.weight.contiguous()));
    if (of_.bias.defined()) affine_.beta = on_device(values_of<P>(beta_ = of_.bias.contiguous()));
    auto const zeros = [&] { return at::zeros({of_.x.size(1)}, of_.x.options().dtype(pass_->parameters)); };
    if (wants_.weight) gradients_.gamma = on_device(values_of<P>(dgamma_ = zeros()));
    if (wants_.bias) gradients_.beta = on_device(values_of<P>(dbeta_ = zeros()));
    epilogue_.activation = pass_->activation;
    if (read_residual_.defined()) epilogue_.residual = make_companion<T>(read_residual_, of_x);
    epilogue_.mask = view_of_mask(pass_->mask);
    epilogue_.masked = pass_->masked;
    if (wants_.residual) dresidual_view_ = *view_of<T>(dresidual_ = at::empty_like(of_x.y), of_x.order);
  }

  C const& comm_;
  std::string fault_;
  backward_pass differentiable_ = backward_pass::impossible;
  at::Tensor read_x_, read_dy_, read_residual_, gamma_, beta_;
  tensor_view<T const> x_view_{}, dy_view_{};
  tensor_view<T> dx_view_{}, dresidual_view_{};
  affine_parameters<parameter> affine_;
  affine_gradients<parameter> gradients_;
  batch_norm_epilogue<T> epilogue_;
};

} // namespace syncnorm::torch::detail
