#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_double_backward.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// What a backward pass gave: which of the gradients of x, weight and bias, and these.
struct backward_results {
  std::array<bool, 3> present{};
  ::torch::autograd::variable_list defined;
};

/// Gives tensors that refuse to be differentiated.
class once_differentiable : public ::torch::autograd::Function<once_differentiable> {
public:
  using tensors = ::torch::autograd::variable_list;

  /// `inputs` are what the tensors depend on, and `what` they are, in plural.
  static tensors forward(::torch::autograd::AutogradContext* recorded, at::TensorList /*inputs*/,
                         std::string const& what, tensors* gradients) {
    recorded->saved_data["what"] = what;
    return *gradients;
  }
  static tensors backward(::torch::autograd::AutogradContext* recorded, tensors const&) {
    throw error{"syncnorm::torch::SyncBatchNorm: " + recorded->saved_data["what"].toStringRef() +
                " cannot be differentiated"};
  }

  /// Makes the defined ones of `results` such tensors.
  static void refuse(std::string const& what, tensors& results, tensors const& inputs) {
    tensors defined, sources;
    std::ranges::copy_if(results, std::back_inserter(defined), &at::Tensor::defined);
    std::ranges::copy_if(inputs, std::back_inserter(sources), &at::Tensor::defined);
    if (defined.empty()) return;
    auto const refusing = apply(at::TensorList{sources}, what, &defined);
    auto next = refusing.begin();
    for (auto& result : results)
      if (result.defined()) result = *next++;
  }
};

/// Records a backward pass that has been computed already, and runs the pass that differentiates it.
class batch_norm_backward_function : public ::torch::autograd::Function<batch_norm_backward_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns the results, recorded as functions of dy, x and weight, the latter of which may be absent.
  static tensors forward(context* recorded, at::Tensor const& dy, at::Tensor const& x,
                         c10::optional<at::Tensor> const& weight, c10::intrusive_ptr<recorded_pass> const& pass,
                         backward_results const* results) {
    recorded->save_for_backward({dy, x, weight.value_or(at::Tensor{})});
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass);
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["exchange"] = pass->state->exchange_backward;
    for (std::size_t i = 0; i < results->present.size(); ++i) recorded->saved_data[names[i]] = results->present[i];
    return results->defined;
  }

  static tensors backward(context* recorded, tensors const& gradients) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    at::Tensor dy, x, weight;
    std::string fault;
    try {
      auto const saved = recorded->get_saved_variables();
      dy = saved.at(0), x = saved.at(1), weight = saved.at(2);
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    auto const type = fault.empty() ? x.scalar_type() : at::kFloat;
    auto results = with_types(type, pass->parameters, [&]<class Types>(Types) {
      using T = typename Types::element;
      return run<T, typename Types::parameter>(*recorded, *pass, gradients, dy, x, weight, std::move(fault));
    });
    if (at::GradMode::is_enabled()) {
      auto inputs = gradients;
      inputs.insert(inputs.end(), {dy, x, weight});
      once_differentiable::refuse("the gradients of its gradients (third derivatives)", results, inputs);
    }
    return results;
  }

private:
  static constexpr std::array<char const*, 3> names{"of x", "of weight", "of bias"};

  template <class T, class P>
  static tensors run(context const& recorded, recorded_pass const& pass, tensors const& gradients, at::Tensor dy,
                     at::Tensor const& x, at::Tensor const& weight, std::string fault) {
    at::AutoGradMode const no_recording{false};
    bool const has_weight = recorded.saved_data.at("weight").toBool();
    // Edges lead to the inputs that are present: dy, x, weight.
    bool const wants_dy = recorded.needs_input_grad(0), wants_x = recorded.needs_input_grad(1);
    bool const wants_weight = has_weight && recorded.needs_input_grad(2);

    operands<T> of_x;
    tensor_view<T const> dy_view;
    tensor_view<T> to_dy_view, to_x_view;
    batch_norm_second_order<T, P> second;
    std::span<P const> gamma;
    std::span<P> gamma_gradient;
    at::Tensor to_dy, to_x, to_weight, u, of_gamma, of_beta, scale;
    try {
      if (fault.empty()) {
        of_x = make_operands<T>(x);
        dy_view = make_companion<T>(dy, of_x);
        auto next = gradients.begin();
        auto const take = [&](std::size_t i) {
          return recorded.saved_data.at(names[i]).toBool() ? *next++ : at::Tensor{};
        };
        u = take(0), of_gamma = take(1), of_beta = take(2);
        if (u.defined()) second.dx = make_companion<T>(u, of_x);
        if (of_gamma.defined()) second.gamma_gradient = values_of<P>(of_gamma = of_gamma.contiguous());
        if (of_beta.defined()) second.beta_gradient = values_of<P>(of_beta = of_beta.contiguous());
        if (has_weight) gamma = values_of<P>(scale = weight.contiguous());
        if (wants_weight)
          gamma_gradient = values_of<P>(to_weight = at::zeros({x.size(1)}, x.options().dtype(pass.parameters)));
        if (wants_x) to_x = of_x.y, to_x_view = of_x.y_view;
        if (wants_dy) {
          to_dy = at::empty_like(of_x.y);
          to_dy_view = *view_of<T>(to_dy, of_x.order);
        }
      }
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    auto& state = *pass.state;
    std::optional<batch_norm_workspace> own;
    auto& workspace = pass.workspace_or(own);
    bool const exchange = recorded.saved_data.at("exchange").toBool();
    batch_norm_double_backward<T, P>(at_executor{}, state.comm, second, dy_view, of_x.x_view, gamma, pass.saved,
                                     to_dy_view, to_x_view, gamma_gradient, {exchange}, workspace, {.fault = fault});
    return {to_dy, to_x, to_weight, {}, {}};
  }
};

} // namespace syncnorm::torch::detail
