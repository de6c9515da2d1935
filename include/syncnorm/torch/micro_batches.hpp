#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

namespace detail {

/// Records a forward pass over micro-batches that has been computed already, and runs its backward pass.
class batches_function : public ::torch::autograd::Function<batches_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns the outputs, recorded as functions of the inputs, weight and bias. `anchor`: see `batch_norm_function`.
  static tensors forward(context* recorded, at::TensorList inputs, c10::optional<at::Tensor> const& weight,
                         c10::optional<at::Tensor> const& bias, c10::optional<at::Tensor> const& /*anchor*/,
                         c10::intrusive_ptr<recorded_pass> const& pass, tensors const* outputs) {
    tensors saved(inputs.begin(), inputs.end());
    saved.push_back(weight.value_or(at::Tensor{}));
    recorded->save_for_backward(std::move(saved));
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass);
    recorded->saved_data["batches"] = static_cast<std::int64_t>(inputs.size());
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["bias"] = bias.has_value();
    return *outputs;
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    std::string fault;
    auto saved = saved_tensors(*recorded, fault);
    auto const type = fault.empty() ? saved.front().scalar_type() : at::kFloat;
    auto gradients = with_types(type, pass->parameters, [&]<class Types>(Types) {
      return run<typename Types::element, typename Types::parameter>(*recorded, *pass, saved, dy, std::move(fault));
    });
    if (at::GradMode::is_enabled())
      batch_norm_backward_function::record(gradients, dy, {saved.begin(), saved.end() - 1}, saved.back(),
                                           {pass, {}, {}});
    return gradients;
  }

private:
  template <class T, class P>
  static tensors run(context const& recorded, recorded_pass const& pass, tensors const& saved, tensors dy,
                     std::string fault) {
    bool const create_graph = at::GradMode::is_enabled();
    at::AutoGradMode const no_recording{false};
    auto const batches = static_cast<std::size_t>(recorded.saved_data.at("batches").toInt());
    bool const has_weight = recorded.saved_data.at("weight").toBool(),
               has_bias = recorded.saved_data.at("bias").toBool();
    // Edges lead to the inputs that are present: those of all micro-batches, weight, bias.
    bool const wants_weight = has_weight && recorded.needs_input_grad(batches);
    bool const wants_bias = has_bias && recorded.needs_input_grad(batches + (has_weight ? 1 : 0));
    bool wants_x = false;
    for (std::size_t k = 0; k < batches; ++k) wants_x = wants_x || recorded.needs_input_grad(k);

    std::vector<operands<T>> of(batches);
    std::vector<tensor_view<T const>> x_views, dy_views;
    std::vector<tensor_view<T>> dx_views;
    affine_parameters<P> affine;
    affine_gradients<P> gradients;
    at::Tensor gamma, dgamma, dbeta;
    for (auto const& each : dy)
      if (fault.empty()) fault = find_gradient_fault(each, create_graph);
    try {
      if (fault.empty()) {
        for (std::size_t k = 0; k < batches; ++k) {
          of[k] = make_operands<T>(saved[k]);
          x_views.push_back(of[k].x_view);
          dy_views.push_back(make_companion<T>(dy.at(k), of[k]));
          if (wants_x) dx_views.push_back(of[k].y_view);
        }
        if (has_weight) affine.gamma = values_of<P>(gamma = saved.back().contiguous());
        auto const per_channel = saved.front().options().dtype(pass.parameters);
        auto const channels = saved.front().size(1);
        if (wants_weight) gradients.gamma = values_of<P>(dgamma = at::zeros({channels}, per_channel));
        if (wants_bias) gradients.beta = values_of<P>(dbeta = at::zeros({channels}, per_channel));
      }
    } catch (std::exception const& e) {
      fault = text_of(e);
    }
    auto& state = *pass.state;
    auto const differentiable =
        create_graph && (wants_x || wants_weight || wants_bias) ? backward_pass::needed : backward_pass::impossible;
    batch_norm_backward_batches<T, P>(at_executor{}, state.comm, dy_views, x_views, dx_views, affine, pass.saved,
                                      gradients, {state.exchange_backward}, state.workspace, {fault, differentiable});
    tensors results(batches);
    for (std::size_t k = 0; k < batches; ++k)
      if (recorded.needs_input_grad(k)) results[k] = of[k].y;
    results.insert(results.end(), {dgamma, dbeta, {}, {}, {}});
    return results;
  }
};

/// Passes of a module over micro-batches.
class batches_of {
public:
  explicit batches_of(SyncBatchNormImpl& norm) : norm_{norm} {}

  [[nodiscard]] std::vector<at::Tensor> forward(std::vector<at::Tensor> const& inputs) const {
    require_on_cpu(norm_.inputs_of({}, {}), "passes over micro-batches");
    if (!norm_.is_training() || norm_.frozen_) {
      if (norm_.in_place_) throw invalid_argument_error{in_place};
      std::vector<at::Tensor> outputs;
      for (auto const& input : inputs) outputs.push_back(norm_.forward(input));
      return outputs;
    }
    bool needs = SyncBatchNormImpl::requires_grad(norm_.weight) || SyncBatchNormImpl::requires_grad(norm_.bias);
    for (auto const& input : inputs) needs = needs || SyncBatchNormImpl::requires_grad(input);
    auto const backward = backward_of(at::GradMode::is_enabled(), needs);
    auto fault = find_fault_of(inputs, backward == backward_pass::needed);
    auto type = at::kFloat, parameters = at::kFloat;
    if (fault.empty()) {
      type = inputs.front().scalar_type();
      parameters =
          type_of_parameters(inputs.front(), {norm_.weight, norm_.bias, norm_.running_mean, norm_.running_var});
    }
    return with_types(type, parameters, [&]<class Types>(Types) {
      return run<typename Types::element, typename Types::parameter>(inputs, parameters, backward, std::move(fault));
    });
  }

private:
  static constexpr char const* in_place = "micro-batches are not normalized in place";

  [[nodiscard]] std::string find_fault_of(std::vector<at::Tensor> const& inputs, bool recorded) const {
    // Without an output a rank would never come to the backward pass.
    if (norm_.in_place_) return in_place;
    if (inputs.empty()) return "there are no micro-batches; pass one without samples";
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      auto text = find_fault(inputs[k], {norm_.weight, norm_.bias}, {norm_.running_mean, norm_.running_var},
                             norm_.num_batches_tracked);
      if (text.empty() && inputs[k].scalar_type() != inputs[0].scalar_type()) text = "the input is of another type";
      if (text.empty())
        text =
            find_recording_fault({{inputs[k], "the input"}, {norm_.weight, "weight"}, {norm_.bias, "bias"}}, recorded);
      if (!text.empty()) return "micro-batch " + std::to_string(k) + ": " + text;
    }
    return {};
  }

  template <class T, class P>
  [[nodiscard]] std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, at::ScalarType parameters,
                                            backward_pass backward, std::string fault) const {
    auto weight = norm_.weight, bias = norm_.bias;
    if (fault.empty() && backward == backward_pass::possible) {
      for (auto& input : inputs) input = savable(input);
      weight = savable(weight), bias = savable(bias);
    }
    auto const pass = c10::make_intrusive<recorded_pass>();
    pass->state = norm_.state_;
    pass->parameters = parameters;
    std::vector<operands<T>> of;
    std::vector<tensor_view<T const>> xs;
    std::vector<tensor_view<T>> ys;
    std::vector<at::Tensor> outputs;
    affine_parameters<P> affine;
    running_statistics<P> running;
    at::Tensor gamma, beta;
    std::int64_t tracked = 0;
    {
      at::AutoGradMode const no_recording{false};
      try {
        if (fault.empty()) {
          for (auto const& input : inputs) {
            of.push_back(make_operands<T>(input));
            xs.push_back(of.back().x_view);
            ys.push_back(of.back().y_view);
            outputs.push_back(of.back().y);
          }
          if (weight.defined()) affine.gamma = values_of<P>(gamma = weight.contiguous());
          if (bias.defined()) affine.beta = values_of<P>(beta = bias.contiguous());
          running = {values_of<P>(norm_.running_mean), values_of<P>(norm_.running_var)};
          auto const& counter = norm_.num_batches_tracked;
          if (counter.defined()) tracked = counter.template item<std::int64_t>();
          if (counter.defined()) running.num_batches_tracked = &tracked;
        }
      } catch (std::exception const& e) {
        fault = text_of(e);
      }
      auto const before = tracked;
      batch_norm_forward_batches<T, P>(at_executor{}, pass->state->comm, xs, ys, affine, running, norm_.make_options(),
                                       pass->saved, pass->state->workspace, {fault, backward});
      if (pass->saved.count > 0) bump_versions({norm_.running_mean, norm_.running_var});
      if (tracked != before) write_counter(norm_.num_batches_tracked, tracked);
    }
    c10::optional<at::Tensor> anchor;
    if (pass->saved.backward_needed && backward != backward_pass::needed) anchor = at::zeros({0}).requires_grad_();
    return batches_function::apply(at::TensorList{inputs}, SyncBatchNormImpl::optional(weight),
                                   SyncBatchNormImpl::optional(bias), anchor, pass, &outputs);
  }

  SyncBatchNormImpl& norm_;
};

} // namespace detail

/// The outputs of K micro-batches by one statistic, that of all of them on all ranks: what `norm` would make of their
/// concatenation, cut up again, with one exchange forward and one backward. In training mode collective; K may differ
/// between ranks, but is at least 1: a rank without samples passes one micro-batch of none. In evaluation mode, and by
/// frozen statistics, `forward` of each.
[[nodiscard]] inline std::vector<::torch::Tensor> forward_batches(SyncBatchNorm& norm,
                                                                  std::vector<::torch::Tensor> const& inputs) {
  return detail::batches_of{*norm}.forward(inputs);
}

} // namespace syncnorm::torch
