#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_in_place.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_forward.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/cuda_begun_passes.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_element.hpp>
#include <syncnorm/torch/detail/cuda_kept.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// A forward pass of a module on a CUDA device by the kernels of `Kernels`, of elements `T` and parameters `P` as on the CPU.
template <class Kernels, communicator C, class T, class P>
class cuda_forward_pass final : public prepared_forward_pass<T, P> {
  using base = prepared_forward_pass<T, P>;
  using base::backward_, base::fault_, base::in_, base::memory_, base::outputs_, base::pass_;
  using element = device_element_t<T>;
  using parameter = device_element_t<P>;

public:
  /// `fault` is what is wrong already.
  cuda_forward_pass(forward_inputs in, std::shared_ptr<device_passes> of, std::shared_ptr<cuda_buffers> buffers,
                    at::Device device, C const& comm, at::ScalarType type, at::ScalarType parameters, std::string fault,
                    backward_pass backward)
      : base{std::move(in), type, parameters, std::move(fault), backward}, comm_{comm},
        record_{std::make_shared<cuda_record>(std::move(buffers))} {
    attempt(this->fault_, [&] {
      record_->allocate(in_.channels, device);
      if (in_.in_place) keep(device);
      if (!this->counts()) return;
      // Of any type, as Module::to converts it, too.
      auto const& tracked = in_.num_batches_tracked;
      counter_ = tracked.scalar_type() == at::kLong ? tracked : at::empty({}, tracked.options().dtype(at::kLong));
    });
    if (!fault_.empty()) outputs_ = outputs_despite_fault(device);
    pass_->device = std::move(of);
    pass_->on_device = record_;
    pass_->saved.scope = in_.scope;
    pass_->saved.exchange = in_.options.exchange;
    // Nobody waits to hear which ranks need gradients, so where this one may record, it joins a backward pass in any case.
    pass_->saved.backward_needed =
        in_.scope == statistics_scope::all_ranks && syncnorm::size(comm) > 1 && backward != backward_pass::impossible;
  }

  [[nodiscard]] std::unique_ptr<device_plan> plan_on_device() override {
    using planned = cuda::detail::planned_forward<Kernels, element, parameter>;
    auto& buffers = *record_->buffers;
    buffers.template load<Kernels, element>();
    c10::DeviceGuard const there{buffers.device()};
    return with_operands([&](operands const& of) {
      return std::make_unique<cuda_plan>(
          buffers, std::make_unique<planned>(of, in_.options, record_->saved(), buffers.workspace(), caller()),
          watch(current_stream(buffers.device())));
    });
  }

  void before() override {
    base::before();
    if (is_converted()) counter_.copy_(in_.num_batches_tracked);
  }
  void after() override {
    if (outputs_.empty()) throw_own_fault();
    base::after();
    if (in_.scope != statistics_scope::all_ranks || !this->mean_.defined()) return;
    bump_versions({in_.running_mean, in_.running_var});
    if (!is_converted()) return bump_versions({counter_});
    std::optional<c10::InferenceMode> writing;
    if (in_.num_batches_tracked.is_inference()) writing.emplace();
    in_.num_batches_tracked.copy_(counter_);
  }

  /// What throws may be the fault of an earlier pass, and this one be under way.
  void fail() noexcept override {
    try {
      if (!outputs_.empty()) after();
    } catch (...) { // the first error is the one to hear of
    }
  }

private:
  using operands = cuda::detail::forward_operands<element, parameter>;

  void compute() override {
    with_operands([&](operands const& of) {
      record_->buffers->template run<Kernels, element>([&](cuda::batch_norm_workspace& workspace, cudaStream_t stream) {
        auto const watched = watch(stream);
        cuda::detail::forward<Kernels, element, parameter>(comm_, of, in_.options, record_->saved(), workspace, stream,
                                                           caller());
      });
    });
  }

  /// f(what the pass reads and writes).
  template <class F>
  decltype(auto) with_operands(F const& f) const {
    auto const x = each_on_device(this->x_views_);
    auto const y = each_on_device(this->y_views_);
    auto const epilogues = each_on_device(this->epilogues_);
    running_statistics<parameter> const running{on_device(this->running_.mean), on_device(this->running_.var),
                                                counter_.defined() ? counter_.data_ptr<std::int64_t>() : nullptr};
    return f(operands{x, y, on_device(this->affine_), running, in_.scope, epilogues, kept()});
  }

  [[nodiscard]] batch_norm_caller caller() const { return {fault_, backward_}; }

  /// Whether the module's counter is of another type.
  [[nodiscard]] bool is_converted() const { return counter_.defined() && !counter_.is_same(in_.num_batches_tracked); }

  /// What a pass in place that is recorded keeps; else nothing.
  [[nodiscard]] std::span<cuda::batch_norm_kept<element>> kept() const {
    if (!pass_->in_place) return {};
    return static_cast<cuda_kept<element>*>(memory_->kept.get())->of;
  }
  /// Watches what is kept of the micro-batch by which passes that follow make room, until the pass is done.
  [[nodiscard]] std::unique_ptr<kept_room::watch> watch(cudaStream_t stream) const {
    auto const* const of = cuda::detail::find_tightest(kept(), std::span{std::as_const(this->epilogues_)});
    bool const keeps = of != nullptr && fault_.empty();
    return std::make_unique<kept_room::watch>(record_->buffers->room(), keeps ? of->memory().state : nullptr, stream);
  }

  /// Makes room for what a pass in place keeps of each x, where it is recorded.
  void keep(at::Device device) {
    auto const kept = std::make_shared<cuda_kept<element>>();
    if (this->records()) {
      auto const wait = [this](cudaStream_t stream) { cuda::batch_norm_workspace::wait(comm_, stream); };
      for (std::size_t k = 0; k < this->x_views_.size(); ++k) {
        auto const x = on_device(this->x_views_[k]);
        auto const room = x.size() == 0
                              ? 0
                              : record_->buffers->room().template channels<element>(
                                    in_.channels, in_.weight, in_.bias, this->epilogues_[k].activation, device, wait);
        kept->allocate(in_.channels, room, x, device);
      }
    }
    memory_->kept = kept;
    pass_->in_place = true;
  }

  /// So that this rank goes on, and hears of its fault where the others do; none where there can be none.
  [[nodiscard]] std::vector<at::Tensor> outputs_despite_fault(at::Device device) const noexcept {
    try {
      std::vector<at::Tensor> zeros;
      for (auto const& input : in_.batches) {
        if (!input.defined()) return {};
        zeros.push_back(at::zeros(input.sizes(), at::TensorOptions{}.dtype(input.dtype()).device(device)));
      }
      return zeros;
    } catch (...) { // the other ranks are waiting
      return {};
    }
  }
  /// Without an output there is nothing to go on with.
  [[noreturn]] void throw_own_fault() {
    record_->buffers->synchronize(comm_); // which throws what the others do
    throw invalid_argument_error{"batch_norm forward: " + fault_};
  }

  C const& comm_;
  std::shared_ptr<cuda_record> record_;
  at::Tensor counter_;
};

} // namespace syncnorm::torch::detail
