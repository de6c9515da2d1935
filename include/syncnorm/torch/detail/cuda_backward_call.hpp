#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_in_place.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_backward.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/cuda_begun_passes.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/cuda_kept.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
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
      : base{std::move(pass), std::move(of), std::move(dy), std::move(wants), std::move(fault)}, comm_{comm} {
    if (!this->pass_->in_place) return;
    attempt(this->fault_, [&] { // y stays for whoever else reads it
      for (std::size_t k = 0; k < this->recovered_.size(); ++k) this->recovered_[k].copy_(this->read_x_[k]);
      this->x_views_.assign(this->recovered_views_.begin(), this->recovered_views_.end());
    });
  }

  void run() override {
    at::AutoGradMode const no_recording{false};
    with_operands([&](operands const& of) {
      record().buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
        cuda::detail::backward<Kernels, element, parameter>(comm_, of, {exchanges()}, record().saved(), workspace,
                                                            stream, caller());
      });
    });
  }

  [[nodiscard]] std::unique_ptr<device_plan> plan_on_device() override {
    using planned = cuda::detail::planned_backward<Kernels, element, parameter>;
    auto& buffers = *record().buffers;
    buffers.template load<Kernels, element>();
    return with_operands([&](operands const& of) {
      return std::make_unique<cuda_plan>(
          buffers, std::make_unique<planned>(of, exchanges(), record().saved(), buffers.workspace(), caller()));
    });
  }

private:
  using operands = cuda::detail::backward_operands<element, parameter>;

  /// f(what the pass reads and writes).
  template <class F>
  decltype(auto) with_operands(F const& f) const {
    auto const dy = each_on_device(this->dy_views_), x = each_on_device(this->x_views_);
    auto const dx = each_on_device(this->dx_views_), dresidual = each_on_device(this->dresidual_views_);
    auto const epilogues = each_on_device(this->epilogues_);
    affine_gradients<parameter> const gradients{on_device(this->gradients_.gamma), on_device(this->gradients_.beta)};
    auto const y = each_on_device(this->recovered_views_);
    std::span<cuda::batch_norm_kept<element>> kept;
    if (this->pass_->in_place && this->fault_.empty()) {
      kept = static_cast<cuda_kept<element>*>(this->memory_->kept.get())->of;
    }
    return f(operands{dy, x, dx, on_device(this->affine_), gradients, epilogues, dresidual, kept, y});
  }
  [[nodiscard]] cuda_record& record() const { return static_cast<cuda_record&>(*this->pass_->on_device); }
  [[nodiscard]] bool exchanges() const { return *this->pass_->state->exchange_backward; }
  [[nodiscard]] batch_norm_caller caller() const { return {this->fault_, this->differentiable_}; }

  C const& comm_;
};

} // namespace syncnorm::torch::detail
