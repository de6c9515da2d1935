#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// Records a forward pass that has been computed already, and runs its backward pass.
class batch_norm_function : public ::torch::autograd::Function<batch_norm_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns y of a pass, recorded as a function of x, weight, bias and residual, of which all but x may be absent.
  /// `anchor` requires a gradient, so that this rank joins a backward pass that others need, when it needs none itself.
  static at::Tensor forward(context* recorded, at::Tensor const& x, c10::optional<at::Tensor> const& weight,
                            c10::optional<at::Tensor> const& bias, c10::optional<at::Tensor> const& residual,
                            c10::optional<at::Tensor> const& /*anchor*/, forward_pass const* pass) {
    auto const of = [](c10::optional<at::Tensor> const& tensor) { return tensor.value_or(at::Tensor{}); };
    tensors saved;
    forward_tensors::of(*pass, {x}, of(weight), of(bias), {of(residual)}).append_to(saved);
    recorded->save_for_backward(std::move(saved));
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass->pass());
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["bias"] = bias.has_value();
    recorded->saved_data["residual"] = residual.has_value();
    return pass->recorded_outputs().front();
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    forward_tensors of;
    std::string fault;
    auto const saved = saved_tensors(*recorded, fault);
    auto next = saved.begin();
    if (fault.empty()) of = forward_tensors::take_from(next, 1);
    // Edges lead to the inputs that are present: x, weight, bias, residual.
    std::size_t edge = 0;
    auto const wants = [&](bool present) { return present && recorded->needs_input_grad(edge++); };
    wanted_gradients wanted;
    wanted.x = {wants(true)};
    wanted.weight = wants(recorded->saved_data["weight"].toBool());
    wanted.bias = wants(recorded->saved_data["bias"].toBool());
    wanted.residuals = {wants(recorded->saved_data["residual"].toBool())};
    auto const call =
        make_backward_call(std::move(pass), std::move(of), {dy.at(0)}, std::move(wanted), std::move(fault));
    call->run();
    auto gradients = call->results();
    gradients.resize(6); // of the anchor, and what is no tensor
    return gradients;
  }
};

/// The output of a pass, recorded as a function of its inputs; and of an anchor.
[[nodiscard]] inline at::Tensor record(forward_pass const& pass, bool anchored) {
  auto const& in = pass.inputs();
  auto const optional = [](at::Tensor const& tensor) {
    return tensor.defined() ? c10::optional<at::Tensor>{tensor} : c10::nullopt;
  };
  c10::optional<at::Tensor> anchor;
  if (anchored) anchor = at::zeros({0}).requires_grad_();
  auto const output = batch_norm_function::apply(in.first(), optional(in.weight), optional(in.bias),
                                                 optional(in.epilogues.front().residual), anchor, &pass);
  return pass.returned(output, 0);
}

/// Whether a pass that has run needs an anchor: where other ranks alone need gradients.
[[nodiscard]] inline bool needs_anchor(forward_pass const& pass) {
  return pass.pass()->saved.backward_needed && !pass.inputs().requires_grad();
}

} // namespace syncnorm::torch::detail
