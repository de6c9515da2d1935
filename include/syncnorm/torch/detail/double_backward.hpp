#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/ops/batch_norm_double_backward.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/refuse_differentiation.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// What a backward pass read besides what its results are functions of, and which of the gradients of the K inputs, weight,
/// bias and the K residuals it gave, and these.
struct backward_results {
  c10::intrusive_ptr<recorded_pass> pass;
  at::Tensor bias;
  std::vector<at::Tensor> residuals;
  at::Tensor memory; ///< by which the memory of the forward pass stays
  std::vector<std::int64_t> present{};
  ::torch::autograd::variable_list defined{};
};

/// What a double backward pass over K inputs reads and writes.
template <class T, class P>
struct double_backward_views {
  std::vector<tensor_view<T const>> dy, x;
  std::vector<tensor_view<T>> to_dy, to_x;
  std::vector<batch_norm_epilogue<T>> epilogues;
  batch_norm_second_order_batches<T, P> second;
  affine_parameters<P> affine;
  std::span<P> gamma_gradient;
  std::string_view fault;
  bool exchange = true;
};

/// Records a backward pass over K inputs that has been computed already, and runs the pass that differentiates it.
class batch_norm_backward_function : public ::torch::autograd::Function<batch_norm_backward_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns the results, recorded as functions of K dy, K x and weight, the latter of which may be absent.
  static tensors forward(context* recorded, at::TensorList of, c10::optional<at::Tensor> const& weight,
                         backward_results const* results) {
    tensors saved(of.begin(), of.end());
    saved.insert(saved.end(), {weight.value_or(at::Tensor{}), results->bias});
    saved.insert(saved.end(), results->residuals.begin(), results->residuals.end());
    saved.push_back(results->memory);
    recorded->save_for_backward(std::move(saved));
    recorded->saved_data["pass"] = c10::IValue::make_capsule(results->pass);
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["exchange"] = *results->pass->state->exchange_backward;
    recorded->saved_data["present"] = results->present;
    return results->defined;
  }

  /// Makes `gradients`, of K inputs, weight, bias and K residuals, functions of what they were made of.
  static void record(tensors& gradients, tensors const& dy, tensors x, at::Tensor const& weight,
                     backward_results results) {
    auto const end = gradients.begin() + static_cast<std::ptrdiff_t>(2 * dy.size() + 2);
    for (auto gradient = gradients.begin(); gradient != end; ++gradient) {
      results.present.push_back(gradient->defined());
      if (gradient->defined()) results.defined.push_back(*gradient);
    }
    if (results.defined.empty()) return;
    x.insert(x.begin(), dy.begin(), dy.end());
    auto const recorded =
        apply(at::TensorList{x}, weight.defined() ? c10::optional<at::Tensor>{weight} : c10::nullopt, &results);
    auto next = recorded.begin();
    for (auto gradient = gradients.begin(); gradient != end; ++gradient)
      if (gradient->defined()) *gradient = *next++;
  }

  static tensors backward(context* recorded, tensors const& gradients) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_pass>(recorded->saved_data["pass"].toCapsule());
    std::string fault;
    auto saved = saved_tensors(*recorded, fault);
    auto results = pass->device == nullptr
                       ? run_on_cpu(*recorded, *pass, gradients, saved, std::move(fault))
                       : pass->device->double_backward(*recorded, *pass, gradients, saved, std::move(fault));
    saved.insert(saved.end(), gradients.begin(), gradients.end());
    refuse_differentiation(
        "syncnorm::torch::SyncBatchNorm: the gradients of its gradients (third derivatives) cannot be differentiated",
        results, saved);
    return results;
  }

  /// The type of the elements, as far as there are any.
  [[nodiscard]] static at::ScalarType type_of(tensors const& saved, std::string const& fault) {
    return fault.empty() ? saved.front().scalar_type() : at::kFloat;
  }

  /// The results, which `pass_over` computes.
  template <class T, class P, class F>
  static tensors run(context const& recorded, recorded_pass const& pass, tensors const& gradients, tensors const& saved,
                     std::string fault, F const& pass_over) {
    at::AutoGradMode const no_recording{false};
    auto const present = recorded.saved_data.at("present").toIntVector();
    auto const batches = present.size() / 2 - 1;
    bool const has_weight = recorded.saved_data.at("weight").toBool();
    // Edges lead to the inputs that are present: dy, x, weight.
    auto const wants = [&](std::size_t edge) { return recorded.needs_input_grad(edge); };
    bool const wants_weight = has_weight && wants(2 * batches);

    for (auto const& each : gradients)
      if (fault.empty()) fault = find_gradient_fault(each, /*recorded=*/false);
    tensors kept, to_dy(batches), to_x(batches);
    std::vector<tensor_view<T const>> u_views, v_views;
    double_backward_views<T, P> of;
    of.to_dy.resize(batches), of.to_x.resize(batches);
    at::Tensor to_weight;
    auto const memory = pass.memory.lock();
    if (fault.empty()) fault = find_memory_fault(pass, memory);
    attempt(fault, [&] {
      auto const keep = [&](at::Tensor const& tensor) -> at::Tensor& { return kept.emplace_back(tensor); };
      auto const per_channel = [&](at::Tensor const& values) {
        return values.defined() ? std::span<P const>{values_of<P>(keep(in_memory(values).contiguous()))}
                                : std::span<P const>{};
      };
      auto next = gradients.begin();
      auto const take = [&](std::size_t i) { return present[i] != 0 ? *next++ : at::Tensor{}; };
      tensors u;
      for (std::size_t k = 0; k < batches; ++k) u.push_back(take(k));
      of.second.gamma_gradient = per_channel(take(batches));
      of.second.beta_gradient = per_channel(take(batches + 1));
      auto const &weight = saved[2 * batches], &bias = saved[2 * batches + 1];
      of.affine = {per_channel(weight), per_channel(bias)};
      for (std::size_t k = 0; k < batches; ++k) {
        auto const of_x = make_operands<T>(saved[batches + k]);
        auto const companion = [&](at::Tensor const& tensor) {
          return tensor.defined() ? make_companion<T>(keep(tensor), of_x) : tensor_view<T const>{};
        };
        keep(of_x.x);
        of.x.push_back(of_x.x_view);
        of.dy.push_back(companion(saved[k]));
        u_views.push_back(companion(u[k]));
        if (wants(k)) of.to_dy[k] = *view_of<T>(to_dy[k] = in_huge_pages(at::empty_like(of_x.y)), of_x.order);
        if (wants(batches + k)) to_x[k] = in_huge_pages(of_x.y), of.to_x[k] = of_x.y_view;
        v_views.push_back(companion(take(batches + 2 + k)));
        auto const& [activation, masked] = pass.epilogues[k];
        auto const& residual = saved[2 * batches + 2 + k];
        // For one whose values are not needed, what has the gradient stands in.
        of.epilogues.push_back(
            {activation, residual.defined() ? companion(residual) : v_views.back(), mask_in(memory, k), masked});
      }
      of.second.dx = u_views, of.second.dresidual = v_views;
      auto const options = saved.front().options().dtype(pass.parameters);
      if (wants_weight) of.gamma_gradient = values_of<P>(to_weight = at::zeros({saved.front().size(1)}, options));
    });
    of.fault = fault;
    of.exchange = recorded.saved_data.at("exchange").toBool();
    pass_over(of);
    tensors results{std::move(to_dy)};
    results.insert(results.end(), to_x.begin(), to_x.end());
    results.insert(results.end(), {to_weight, {}});
    return results;
  }

private:
  static tensors run_on_cpu(context const& recorded, recorded_pass const& pass, tensors const& gradients,
                            tensors const& saved, std::string fault) {
    return with_types(type_of(saved, fault), pass.parameters, [&]<class Types>(Types) {
      return run_typed<typename Types::element, typename Types::parameter>(recorded, pass, gradients, saved,
                                                                           std::move(fault));
    });
  }

  template <class T, class P>
  static tensors run_typed(context const& recorded, recorded_pass const& pass, tensors const& gradients,
                           tensors const& saved, std::string fault);
};

// As of `prepared_forward_pass`.
template <class T, class P>
batch_norm_backward_function::tensors
batch_norm_backward_function::run_typed(context const& recorded, recorded_pass const& pass, tensors const& gradients,
                                        tensors const& saved, std::string fault) {
  return run<T, P>(recorded, pass, gradients, saved, std::move(fault), [&](double_backward_views<T, P> const& of) {
    std::optional<batch_norm_workspace> own;
    batch_norm_double_backward_batches<T, P>(at_executor{}, pass.state->comm, of.second, of.dy, of.x, of.affine,
                                             pass.saved, of.to_dy, of.to_x, of.gamma_gradient, {of.exchange},
                                             pass.workspace_or(own), {.fault = of.fault}, of.epilogues);
  });
}

} // namespace syncnorm::torch::detail
