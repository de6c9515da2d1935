#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_backward.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// Records a forward pass that has been computed already, and runs its backward pass.
class batch_norm_function : public ::torch::autograd::Function<batch_norm_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns y, recorded as a function of x, weight and bias, the latter of which may be absent. `anchor` requires a
  /// gradient, so that this rank joins a backward pass that others need, when it needs none itself.
  static at::Tensor forward(context* recorded, at::Tensor const& x, c10::optional<at::Tensor> const& weight,
                            c10::optional<at::Tensor> const& bias, c10::optional<at::Tensor> const& /*anchor*/,
                            c10::intrusive_ptr<recorded_pass> const& pass, at::Tensor const* y) {
    recorded->save_for_backward({x, weight.value_or(at::Tensor{})});
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass);
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["bias"] = bias.has_value();
    return *y;
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    at::Tensor x, weight;
    std::string fault;
    try {
      // Tells of tensors that were modified since, and of a graph that was freed, on this rank alone.
      auto const saved = recorded->get_saved_variables();
      x = saved.at(0);
      weight = saved.at(1);
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    bool const is_double = fault.empty() && x.scalar_type() == at::kDouble;
    auto gradients = is_double ? run<double>(*recorded, *pass, x, weight, dy.at(0), std::move(fault))
                               : run<float>(*recorded, *pass, x, weight, dy.at(0), std::move(fault));
    if (at::GradMode::is_enabled()) record_backward(gradients, dy.at(0), x, weight, pass);
    return gradients;
  }

private:
  template <class T>
  static tensors run(context const& recorded, recorded_pass const& pass, at::Tensor const& x, at::Tensor const& weight,
                     at::Tensor dy, std::string fault) {
    bool const create_graph = at::GradMode::is_enabled();
    at::AutoGradMode const no_recording{false};
    bool const has_weight = recorded.saved_data.at("weight").toBool(),
               has_bias = recorded.saved_data.at("bias").toBool();
    // Edges lead to the inputs that are present: x, weight, bias.
    bool const wants_x = recorded.needs_input_grad(0);
    bool const wants_weight = has_weight && recorded.needs_input_grad(1);
    bool const wants_bias = has_bias && recorded.needs_input_grad(has_weight ? 2 : 1);
    auto const differentiable =
        create_graph && (wants_x || wants_weight || wants_bias) ? backward_pass::needed : backward_pass::impossible;

    operands<T> of_x;
    tensor_view<T const> dy_view;
    tensor_view<T> dx_view;
    affine_parameters<T> affine;
    affine_gradients<T> gradients;
    at::Tensor gamma, dx, dgamma, dbeta;
    try {
      if (fault.empty()) {
        of_x = make_operands<T>(x);
        dy_view = make_companion<T>(dy, of_x);
        if (wants_x) dx = of_x.y, dx_view = of_x.y_view;
        if (has_weight) affine.gamma = values_of<T>(gamma = weight.contiguous());
        if (wants_weight) gradients.gamma = values_of<T>(dgamma = at::zeros({x.size(1)}, x.options()));
        if (wants_bias) gradients.beta = values_of<T>(dbeta = at::zeros({x.size(1)}, x.options()));
      }
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    // Only passes that exchange are in one thread at a time.
    auto& state = *pass.state;
    std::optional<batch_norm_workspace> own;
    auto& workspace = pass.saved.scope == statistics_scope::all_ranks
                          ? state.workspace
                          : own.emplace(static_cast<std::int64_t>(pass.saved.mean.size()), true);
    batch_norm_backward<T const, T>(at_executor{}, state.comm, dy_view, of_x.x_view, dx_view, affine, pass.saved,
                                    gradients, {state.exchange_backward}, workspace, {fault, differentiable});
    return {dx, dgamma, dbeta, {}, {}, {}};
  }

  /// Records gradients as functions of what they were made of, to be differentiated in turn.
  static void record_backward(tensors& gradients, at::Tensor const& dy, at::Tensor const& x, at::Tensor const& weight,
                              c10::intrusive_ptr<recorded_pass> const& pass) {
    backward_results results;
    for (std::size_t i = 0; i < results.present.size(); ++i)
      if ((results.present[i] = gradients[i].defined())) results.defined.push_back(gradients[i]);
    if (results.defined.empty()) return;
    auto const recorded = batch_norm_backward_function::apply(
        dy, x, weight.defined() ? c10::optional<at::Tensor>{weight} : c10::nullopt, pass, &results);
    auto next = recorded.begin();
    for (auto& gradient : gradients)
      if (gradient.defined()) gradient = *next++;
  }
};

} // namespace syncnorm::torch::detail
