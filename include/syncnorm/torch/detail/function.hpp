#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/begin_together.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// Passes that are recorded as one function: one, perhaps over micro-batches, or those of a group.
struct recorded_group : ::torch::CustomClassHolder {
  struct member {
    c10::intrusive_ptr<recorded_pass> pass;
    std::size_t batches;         ///< how many x and y there are
    bool weight, bias;           ///< whether there are these, besides
    std::vector<bool> residuals; ///< the same of each micro-batch
  };
  std::vector<member> members;
  bool together = false; ///< whether they travel together; else there is one
};

/// Records forward passes that have been computed already, and runs their backward passes in one.
class batch_norm_function : public ::torch::autograd::Function<batch_norm_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns the outputs, recorded as functions of `inputs`: those of each member, weight, bias and residuals, as far as they
  /// are there, and perhaps an anchor, which requires a gradient, so that this rank joins a backward pass that others need, when it
  /// needs none itself.
  static tensors forward(context* recorded, at::TensorList inputs, c10::intrusive_ptr<recorded_group> const& group,
                         std::span<std::unique_ptr<forward_pass> const> const* passes) {
    tensors saved, outputs;
    auto next = inputs.begin();
    for (std::size_t l = 0; l < passes->size(); ++l) {
      auto const& pass = *(*passes)[l];
      auto const& [of_pass, batches, has_weight, has_bias, has_residuals] = group->members[l];
      auto const take = [&](bool there) { return there ? *next++ : at::Tensor{}; };
      tensors x(next, next + static_cast<std::ptrdiff_t>(batches));
      next += static_cast<std::ptrdiff_t>(batches);
      auto const weight = take(has_weight), bias = take(has_bias);
      tensors residuals;
      for (bool const there : has_residuals) residuals.push_back(take(there));
      forward_tensors::of(pass, std::move(x), weight, bias, std::move(residuals)).append_to(saved);
      auto const of_these = pass.recorded_outputs();
      outputs.insert(outputs.end(), of_these.begin(), of_these.end());
    }
    recorded->save_for_backward(std::move(saved));
    recorded->saved_data["group"] = c10::IValue::make_capsule(group);
    recorded->saved_data["inputs"] = static_cast<std::int64_t>(inputs.size());
    return outputs;
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto const group = c10::static_intrusive_pointer_cast<recorded_group>(recorded->saved_data["group"].toCapsule());
    std::string fault;
    auto const saved = saved_tensors(*recorded, fault);
    if (!fault.empty() && group->members.size() > 1) fault = "of this or another layer of the group: " + fault;
    auto next = saved.begin();
    auto next_dy = dy.begin();
    std::vector<std::unique_ptr<backward_call>> calls;
    std::size_t edge = 0;
    for (auto const& member : group->members) {
      auto const wants = [&](bool there) { return there && recorded->needs_input_grad(edge++); };
      wanted_gradients wanted;
      for (std::size_t k = 0; k < member.batches; ++k) wanted.x.push_back(wants(true));
      wanted.weight = wants(member.weight);
      wanted.bias = wants(member.bias);
      for (bool const there : member.residuals) wanted.residuals.push_back(wants(there));
      forward_tensors of;
      if (fault.empty()) of = forward_tensors::take_from(next, member.batches);
      auto const end_of_dy = next_dy + static_cast<std::ptrdiff_t>(member.batches);
      calls.push_back(make_backward_call(member.pass, std::move(of), {next_dy, end_of_dy}, std::move(wanted), fault));
      next_dy = end_of_dy;
    }
    if (group->together) {
      at::AutoGradMode const no_recording{false};
      begin_together(calls, true)->finish([] {}, [] {});
    } else {
      calls.front()->run();
    }
    tensors results;
    for (std::size_t l = 0; l < calls.size(); ++l) {
      auto const& member = group->members[l];
      auto const of_member = calls[l]->results();
      auto gradient = of_member.begin() + static_cast<std::ptrdiff_t>(member.batches);
      results.insert(results.end(), of_member.begin(), gradient);
      auto const put = [&](bool there) {
        if (there) results.push_back(*gradient);
        ++gradient;
      };
      put(member.weight), put(member.bias);
      for (bool const there : member.residuals) put(there);
    }
    // Of the anchor, if there is one, and what is no tensor.
    results.resize(static_cast<std::size_t>(recorded->saved_data["inputs"].toInt()) + 2);
    return results;
  }
};

/// The outputs of the passes of a group, or of one that is not `together` with others, recorded as functions of their inputs; and
/// of an anchor.
[[nodiscard]] inline std::vector<at::Tensor> record(std::span<std::unique_ptr<forward_pass> const> passes,
                                                    bool together, bool anchored) {
  auto const group = c10::make_intrusive<recorded_group>();
  group->together = together;
  std::vector<at::Tensor> inputs;
  for (auto const& pass : passes) {
    auto const& in = pass->inputs();
    auto& member = group->members.emplace_back(
        recorded_group::member{pass->pass(), in.batches.size(), in.weight.defined(), in.bias.defined(), {}});
    inputs.insert(inputs.end(), in.batches.begin(), in.batches.end());
    auto const add = [&](at::Tensor const& tensor) {
      if (tensor.defined()) inputs.push_back(tensor);
    };
    add(in.weight), add(in.bias);
    for (auto const& with : in.epilogues) {
      member.residuals.push_back(with.residual.defined());
      add(with.residual);
    }
  }
  if (anchored) inputs.push_back(at::zeros({0}).requires_grad_());
  auto recorded = batch_norm_function::apply(at::TensorList{inputs}, group, &passes);
  auto next = recorded.begin();
  for (auto const& pass : passes)
    for (std::size_t k = 0; k < pass->inputs().batches.size(); ++k, ++next) *next = pass->returned(*next, k);
  return recorded;
}

/// Whether a pass that has run needs an anchor: where other ranks alone need gradients.
[[nodiscard]] inline bool needs_anchor(forward_pass const& pass) {
  return pass.pass()->saved.backward_needed && !pass.inputs().requires_grad();
}

} // namespace syncnorm::torch::detail
