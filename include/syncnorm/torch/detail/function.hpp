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
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_backward.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/epilogue.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// Records a forward pass that has been computed already, and runs its backward pass.
class batch_norm_function : public ::torch::autograd::Function<batch_norm_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns y, recorded as a function of x, which it may be, weight, bias and residual, of which all but x may be absent.
  /// `anchor` requires a gradient, so that this rank joins a backward pass that others need, when it needs none itself.
  static at::Tensor forward(context* recorded, at::Tensor const& x, c10::optional<at::Tensor> const& weight,
                            c10::optional<at::Tensor> const& bias, c10::optional<at::Tensor> const& residual,
                            c10::optional<at::Tensor> const& /*anchor*/, c10::intrusive_ptr<recorded_pass> const& pass,
                            at::Tensor const* y) {
    // What was activated depends on bias and residual; so does x where it is recovered from y.
    bool const in_place = pass->kept != nullptr, needs_bias = in_place || pass->activation.negative_slope != 1;
    recorded->save_for_backward({in_place ? *y : x, weight.value_or(at::Tensor{}),
                                 needs_bias ? bias.value_or(at::Tensor{}) : at::Tensor{},
                                 residual.value_or(at::Tensor{})});
    if (in_place) recorded->mark_dirty({x});
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass);
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["bias"] = bias.has_value();
    return *y;
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    at::Tensor x, weight, bias, residual;
    std::string fault;
    try {
      // Tells of tensors that were modified since, and of a graph that was freed, on this rank alone.
      auto const saved = recorded->get_saved_variables();
      x = saved.at(0);
      weight = saved.at(1), bias = saved.at(2), residual = saved.at(3);
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    auto const type = fault.empty() ? x.scalar_type() : at::kFloat;
    auto gradients = with_types(type, pass->parameters, [&]<class Types>(Types) {
      using T = typename Types::element;
      using P = typename Types::parameter;
      return run<T, P>(*recorded, *pass, {x, weight, bias, residual}, dy.at(0), std::move(fault));
    });
    if (at::GradMode::is_enabled() && pass->kept != nullptr)
      once_differentiable::refuse("the gradients of a pass in place (double backward)", gradients,
                                  {dy.at(0), x, weight, residual});
    else if (at::GradMode::is_enabled())
      batch_norm_backward_function::record(gradients, {dy.at(0)}, {x}, weight, {pass, bias, residual});
    return gradients;
  }

private:
  /// What the forward pass read, as far as it is needed.
  struct forward_inputs {
    at::Tensor x, weight, bias, residual;
  };

  template <class T, class P>
  static tensors run(context const& recorded, recorded_pass const& pass, forward_inputs of, at::Tensor dy,
                     std::string fault) {
    auto& [x, weight, bias, residual] = of;
    bool const create_graph = at::GradMode::is_enabled();
    at::AutoGradMode const no_recording{false};
    bool const has_weight = recorded.saved_data.at("weight").toBool(),
               has_bias = recorded.saved_data.at("bias").toBool();
    // Edges lead to the inputs that are present: x, weight, bias, residual.
    bool const wants_x = recorded.needs_input_grad(0);
    bool const wants_weight = has_weight && recorded.needs_input_grad(1);
    bool const wants_bias = has_bias && recorded.needs_input_grad(has_weight ? 2 : 1);
    std::size_t const of_residual = 1 + (has_weight ? 1 : 0) + (has_bias ? 1 : 0);
    bool const wants_residual = residual.defined() && recorded.needs_input_grad(of_residual);
    bool const twice = create_graph && pass.kept == nullptr;
    auto const differentiable = twice && (wants_x || wants_weight || wants_bias || wants_residual)
                                    ? backward_pass::needed
                                    : backward_pass::impossible;

    operands<T> of_x;
    tensor_view<T const> dy_view;
    tensor_view<T> dx_view, dresidual_view;
    affine_parameters<P> affine;
    affine_gradients<P> gradients;
    batch_norm_epilogue<T> epilogue{.activation = pass.activation};
    at::Tensor gamma, beta, dx, dgamma, dbeta, dresidual;
    try {
      if (fault.empty()) {
        of_x = make_operands<T>(x);
        dy_view = make_companion<T>(dy, of_x);
        if (wants_x) dx = of_x.y, dx_view = of_x.y_view;
        if (has_weight) affine.gamma = values_of<P>(gamma = weight.contiguous());
        if (bias.defined()) affine.beta = values_of<P>(beta = bias.contiguous());
        auto const per_channel = x.options().dtype(pass.parameters);
        if (wants_weight) gradients.gamma = values_of<P>(dgamma = at::zeros({x.size(1)}, per_channel));
        if (wants_bias) gradients.beta = values_of<P>(dbeta = at::zeros({x.size(1)}, per_channel));
        if (residual.defined()) epilogue.residual = make_companion<T>(residual, of_x);
        if (pass.kept) {
          // x is made again where its gradient will be.
          auto const& kept = *static_cast<batch_norm_kept<T> const*>(pass.kept.get());
          fault = kept.recover(at_executor{}, of_x.x_view, of_x.y_view, affine, pass.saved, epilogue);
          of_x.x_view = of_x.y_view;
        }
        epilogue.mask = view_of_mask(pass.mask);
        epilogue.masked = pass.masked;
        if (wants_residual) {
          dresidual = at::empty_like(of_x.y);
          dresidual_view = *view_of<T>(dresidual, of_x.order);
        }
      }
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    auto& state = *pass.state;
    std::optional<batch_norm_workspace> own;
    auto& workspace = pass.workspace_or(own);
    batch_norm_backward<T const, P>(at_executor{}, state.comm, dy_view, of_x.x_view, dx_view, affine, pass.saved,
                                    gradients, {state.exchange_backward}, workspace, {fault, differentiable}, epilogue,
                                    dresidual_view);
    return {dx, dgamma, dbeta, dresidual, {}, {}, {}};
  }
};

} // namespace syncnorm::torch::detail
