#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/cuda_batch_norm_forward.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch::detail {

/// A forward pass of a module on a CUDA device by the kernels of `Kernels`, of elements of libtorch's type `T` and parameters
/// of type `P`.
template <class Kernels, communicator C, class T, class P>
class cuda_forward_pass final : public forward_pass {
  using element = device_element_t<T>;
  using parameter = device_element_t<P>;

public:
  /// `fault` is what is wrong already.
  cuda_forward_pass(forward_inputs in, std::shared_ptr<cuda_buffers> buffers, at::Device device, C const& comm,
                    at::ScalarType type, at::ScalarType parameters, std::string fault, backward_pass backward)
      : forward_pass{std::move(in), type, parameters, std::move(fault), backward}, comm_{comm},
        record_{std::make_shared<cuda_record>(std::move(buffers))} {
    at::AutoGradMode const no_recording{false};
    try {
      if (fault_.empty()) take(device);
    } catch (std::exception const& e) {
      fault_ = text_of(e);
    }
    output_ = of_.y;
    if (!fault_.empty()) output_ = output_despite_fault(device);
    pass_->on_device = record_;
    pass_->saved.scope = in_.scope;
    pass_->saved.exchange = in_.options.exchange;
    // Nobody waits to hear which ranks need gradients, so where this one may record, it joins a backward pass in any case.
    pass_->saved.backward_needed =
        in_.scope == statistics_scope::all_ranks && syncnorm::size(comm) > 1 && backward != backward_pass::impossible;
  }

private:
  void compute() override {
    auto const x = on_device(of_.x_view);
    auto const y = on_device(of_.y_view);
    auto const epilogue = on_device(epilogue_);
    cuda::detail::forward_operands<element, parameter> const operands{{&x, 1},  {&y, 1},   affine_,
                                                                      running_, in_.scope, {&epilogue, 1}};
    record_->buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
      cuda::detail::forward<Kernels, element, parameter>(comm_, operands, in_.options, record_->saved(), workspace,
                                                         stream, {fault_, backward_});
    });
    if (!output_.defined()) throw invalid_argument_error{"batch_norm forward: " + fault_};
    if (in_.scope != statistics_scope::all_ranks || !mean_.defined()) return;
    bump_versions({in_.running_mean, in_.running_var});
    if (!counter_.defined()) return;
    if (counter_.is_same(in_.num_batches_tracked)) return bump_versions({counter_});
    std::optional<c10::InferenceMode> writing;
    if (in_.num_batches_tracked.is_inference()) writing.emplace();
    in_.num_batches_tracked.copy_(counter_);
  }

  /// So that this rank goes on, and hears of its fault where the others do; undefined where there can be none.
  [[nodiscard]] at::Tensor output_despite_fault(at::Device device) const noexcept {
    try {
      if (!in_.input.defined()) return {};
      return at::zeros(in_.input.sizes(), at::TensorOptions{}.dtype(in_.input.dtype()).device(device));
    } catch (...) { // the other ranks are waiting
      return {};
    }
  }

  void take(at::Device device) {
    record_->allocate(in_.channels, device);
    of_ = make_operands<T>(in_.input);
    if (in_.weight.defined()) affine_.gamma = on_device(values_of<P>(gamma_ = in_.weight.contiguous()));
    if (in_.bias.defined()) affine_.beta = on_device(values_of<P>(beta_ = in_.bias.contiguous()));
    epilogue_.activation = in_.with.activation;
    residual_ = in_.with.residual;
    if (residual_.defined()) epilogue_.residual = make_companion<T>(residual_, of_);
    if (in_.with.mask.defined()) pass_->mask = dense_mask(in_.with.mask, of_.order);
    epilogue_.mask = view_of_mask(pass_->mask);
    epilogue_.masked = in_.with.masked;
    if (in_.scope == statistics_scope::this_rank || !in_.running_mean.defined()) return;
    mean_ = in_.running_mean.detach(), var_ = in_.running_var.detach();
    running_ = {on_device(values_of<P>(mean_)), on_device(values_of<P>(var_))};
    if (in_.scope == statistics_scope::constant || !in_.num_batches_tracked.defined()) return;
    // Of any type, as Module::to converts it, too.
    auto const& tracked = in_.num_batches_tracked;
    counter_ = tracked.scalar_type() == at::kLong ? tracked : tracked.to(at::kLong);
    running_.num_batches_tracked = counter_.data_ptr<std::int64_t>();
  }

  C const& comm_;
  std::shared_ptr<cuda_record> record_;
  operands<T> of_;
  affine_parameters<parameter> affine_;
  running_statistics<parameter> running_;
  batch_norm_epilogue<T> epilogue_;
  at::Tensor gamma_, beta_, residual_, counter_;
};

} // namespace syncnorm::torch::detail
