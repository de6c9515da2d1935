#pragma once

#include <algorithm>
#include <iterator>
#include <string>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/core/error.hpp>

namespace syncnorm::torch::detail {

/// Gives tensors whose differentiation is an error.
class refuses_differentiation : public ::torch::autograd::Function<refuses_differentiation> {
public:
  using tensors = ::torch::autograd::variable_list;

  /// `inputs` are what the tensors depend on.
  static tensors forward(::torch::autograd::AutogradContext* recorded, at::TensorList /*inputs*/,
                         std::string const& text, tensors* results) {
    recorded->saved_data["text"] = text;
    return *results;
  }
  static tensors backward(::torch::autograd::AutogradContext* recorded, tensors const&) {
    throw error{recorded->saved_data["text"].toStringRef()};
  }
};

/// Has whoever differentiates `results`, functions of `inputs`, get the error `text`, where autograd records that it may be done.
inline void refuse_differentiation(std::string const& text, ::torch::autograd::variable_list& results,
                                   ::torch::autograd::variable_list const& inputs) {
  if (!at::GradMode::is_enabled()) return;
  ::torch::autograd::variable_list defined, sources;
  std::ranges::copy_if(results, std::back_inserter(defined), &at::Tensor::defined);
  std::ranges::copy_if(inputs, std::back_inserter(sources), &at::Tensor::defined);
  if (defined.empty()) return;
  auto const refusing = refuses_differentiation::apply(at::TensorList{sources}, text, &defined);
  auto next = refusing.begin();
  for (auto& result : results)
    if (result.defined()) result = *next++;
}

} // namespace syncnorm::torch::detail
