#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/group_function.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

namespace detail {

/// Passes of a module over micro-batches.
class batches_of {
public:
  [[nodiscard]] static std::vector<at::Tensor> forward(SyncBatchNormImpl& norm,
                                                       std::vector<at::Tensor> const& batches) {
    constexpr char const* in_place = "micro-batches are not normalized in place";
    if (!norm.is_training() || norm.frozen_) {
      if (norm.in_place_) throw invalid_argument_error{in_place};
      std::vector<at::Tensor> outputs;
      for (auto const& batch : batches) outputs.push_back(norm.forward(batch));
      return outputs;
    }
    auto inputs = norm.inputs_of(batches, {});
    inputs.in_place = false;
    auto const backward = backward_of(at::GradMode::is_enabled(), inputs.requires_grad());
    std::vector<std::unique_ptr<forward_pass>> passes;
    passes.push_back(make_pass_anywhere(std::move(inputs), backward, norm.in_place_ ? in_place : std::string{}));
    passes.front()->run();
    return record_group(passes, false, needs_anchor(*passes.front()));
  }
};

} // namespace detail

/// The outputs of K micro-batches by one statistic, that of all of them on all ranks: what `norm` would make of their
/// concatenation, cut up again, with one exchange forward and one backward. In training mode collective; K may differ
/// between ranks, but is at least 1: a rank without samples passes one micro-batch of none. In evaluation mode, and by
/// frozen statistics, `forward` of each.
[[nodiscard]] inline std::vector<::torch::Tensor> forward_batches(SyncBatchNorm& norm,
                                                                  std::vector<::torch::Tensor> const& inputs) {
  return detail::batches_of::forward(*norm, inputs);
}

} // namespace syncnorm::torch
