#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/TracerMode.h>
#include <c10/core/InferenceMode.h>

#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/torch/element.hpp>

namespace syncnorm::torch::detail {

/// The fault that `find` returns, or what it throws, without libtorch's backtrace: tensors of some kinds, as nested ones, have no
/// extents to ask for.
template <class F>
[[nodiscard]] std::string fault_or_thrown(F const& find) {
  return syncnorm::detail::fault_or_thrown([&]() -> std::string {
    try {
      return find();
    } catch (c10::Error const& e) {
      return e.what_without_backtrace();
    }
  });
}

/// f(), with nothing recorded, unless there is a `fault` already; what it throws is one.
template <class F>
void attempt(std::string& fault, F const& f) {
  if (!fault.empty()) return;
  at::AutoGradMode const no_recording{false};
  fault = fault_or_thrown([&] {
    f();
    return std::string{};
  });
}

/// The type of the first of the parameters and statistics that is defined; without any, float or double as the input.
[[nodiscard]] inline at::ScalarType type_of_parameters(at::Tensor const& input,
                                                       std::array<at::Tensor, 4> const& parameters) {
  for (auto const& tensor : parameters)
    if (tensor.defined()) return tensor.scalar_type();
  return input.defined() && input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// `tensor` is where the passes are.
inline void require_on(syncnorm::detail::call_check& check, at::Tensor const& tensor, char const* name, at::Device on) {
  check.require(tensor.layout() == at::kStrided,
                [&] { return check.text(name, " is ", tensor.layout(), ", expected Strided"); });
  bool const there = on.is_cpu() ? tensor.device().is_cpu() : tensor.device() == on;
  check.require(there, [&] {
    return check.text(name, " is on ", tensor.device(), ", expected ", on,
                      tensor.is_cuda() && on.is_cpu() ? ": CUDA tensors need syncnorm::torch::use_cuda, and the module "
                                                        "there, too"
                                                      : "");
  });
}

/// A trace would have none of what a pass computes, as it writes to memory by itself.
inline void refuse_tracing(syncnorm::detail::call_check& check) {
  check.require(!at::tracer::impl::is_dispatch_enabled(),
                [] { return "the pass is traced for TorchScript, which cannot be done"; });
}

/// What libtorch tensors can have wrong besides what a pass on the device `on` checks for itself; empty where nothing is.
[[nodiscard]] inline std::string find_fault(at::Tensor const& input, std::array<at::Tensor, 2> const& parameters,
                                            std::array<at::Tensor, 2> const& running,
                                            at::Tensor const& num_batches_tracked, at::Device on = at::kCPU) {
  syncnorm::detail::call_check check;
  refuse_tracing(check);
  auto const on_device = [&](at::Tensor const& tensor, char const* name) { require_on(check, tensor, name, on); };
  check.require(input.defined(), [] { return "the input is undefined"; });
  if (check.failed()) return check.fault();
  on_device(input, "the input");
  auto const type = input.scalar_type();
  check.require(is_supported(type),
                [&] { return check.text("the input is of ", type, ", expected Float, Double, Half or BFloat16"); });
  check.require(input.dim() >= 2, [&] {
    return check.text("the input has ", input.dim(), " dimensions, expected at least 2, [N, C, ...]");
  });

  auto const parameters_type = type_of_parameters(input, {parameters[0], parameters[1], running[0], running[1]});
  auto const of_channels = [&](at::Tensor const& tensor, char const* name) {
    if (!tensor.defined()) return;
    on_device(tensor, name);
    check.require(tensor.dim() == 1,
                  [&] { return check.text(name, " has ", tensor.dim(), " dimensions, expected 1, [C]"); });
    check.require(is_supported(type, tensor.scalar_type()),
                  [&] { return check.text("the input is of ", type, ", but ", name, " of ", tensor.scalar_type()); });
    check.require(tensor.scalar_type() == parameters_type, [&] {
      return check.text(name, " is of ", tensor.scalar_type(), ", but other parameters or statistics of ",
                        parameters_type);
    });
  };
  of_channels(parameters[0], "weight");
  of_channels(parameters[1], "bias");
  of_channels(running[0], "running_mean");
  of_channels(running[1], "running_var");
  check.require(running[0].defined() == running[1].defined(),
                [] { return "only one of running_mean and running_var is given"; });
  for (auto const& tensor : running)
    check.require(!tensor.defined() || tensor.is_contiguous(),
                  [] { return "running_mean or running_var is not contiguous"; });
  if (num_batches_tracked.defined()) {
    on_device(num_batches_tracked, "num_batches_tracked");
    check.require(num_batches_tracked.numel() == 1, [] { return "num_batches_tracked is not one value"; });
  }
  return check.fault();
}

/// A tensor, perhaps undefined, and what messages call it.
struct named_tensor {
  at::Tensor const& tensor;
  char const* name;
};

/// What keeps autograd from recording a function of these tensors, given whether it saves them; empty: nothing.
[[nodiscard]] inline std::string find_recording_fault(std::initializer_list<named_tensor> tensors, bool saves) {
  for (auto const& [tensor, name] : tensors) {
    if (!tensor.defined()) continue;
    if (tensor._fw_grad(/*level=*/0).defined())
      return std::string{name} + " has a forward gradient, and forward-mode differentiation is not implemented";
    if (saves && tensor.is_inference())
      return std::string{name} + " is an inference tensor, which autograd cannot save; pass a clone of it";
    if (!saves) continue;
    // A view whose base was written to may have a history that autograd refuses.
    auto const refused = fault_or_thrown([&] { return (void)tensor.grad_fn(), std::string{}; });
    if (!refused.empty()) return refused;
  }
  return {};
}

/// What is wrong with a tensor that a backward pass is given, given whether it is recorded itself.
[[nodiscard]] inline std::string find_gradient_fault(at::Tensor const& gradient, bool recorded) {
  if (gradient.defined() && gradient.layout() != at::kStrided)
    return syncnorm::detail::call_check::text("the gradient of an output is ", gradient.layout(), ", expected Strided");
  return find_recording_fault({{gradient, "the gradient of an output"}}, recorded);
}

/// `tensor`, or where that is an inference tensor a copy that autograd can save.
[[nodiscard]] inline at::Tensor savable(at::Tensor const& tensor) {
  return tensor.defined() && tensor.is_inference() ? tensor.clone() : tensor;
}

/// Sets the one value of `num_batches_tracked`, which may be an inference tensor.
inline void write_counter(at::Tensor const& num_batches_tracked, std::int64_t value) {
  std::optional<c10::InferenceMode> writing;
  if (num_batches_tracked.is_inference()) writing.emplace();
  num_batches_tracked.fill_(value);
}

/// Tells autograd that the tensors were written to.
inline void bump_versions(std::initializer_list<at::Tensor> tensors) {
  for (auto const& tensor : tensors)
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

} // namespace syncnorm::torch::detail
