#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/group_function.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/pending_forward.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

namespace detail {

/// Passes of a module over micro-batches.
class batches_of {
public:
  /// Whether they share one statistic.
  [[nodiscard]] static bool are_together(SyncBatchNormImpl const& norm) { return norm.is_training() && !norm.frozen_; }

  /// One pass over all, or, where they share no statistic, one over each.
  [[nodiscard]] static std::vector<std::unique_ptr<forward_pass>> passes(SyncBatchNormImpl& norm,
                                                                         std::vector<at::Tensor> const& batches) {
    std::vector<std::unique_ptr<forward_pass>> passes;
    auto const add = [&](std::vector<at::Tensor> some) {
      auto inputs = norm.inputs_of(std::move(some), {});
      std::string fault = inputs.in_place ? "micro-batches are not normalized in place" : "";
      inputs.in_place = false;
      auto const backward = backward_of(at::GradMode::is_enabled(), inputs.requires_grad());
      passes.push_back(make_pass_anywhere(std::move(inputs), backward, std::move(fault)));
    };
    if (are_together(norm) || batches.empty()) {
      add(batches);
    } else {
      for (auto const& batch : batches) add({batch});
    }
    return passes;
  }

  [[nodiscard]] static std::vector<at::Tensor> forward(SyncBatchNormImpl& norm,
                                                       std::vector<at::Tensor> const& batches) {
    auto const all = passes(norm, batches);
    for (auto const& pass : all) pass->run();
    if (are_together(norm)) return record_group(all, false, needs_anchor(*all.front()));
    std::vector<at::Tensor> outputs;
    for (auto const& pass : all) outputs.push_back(record(*pass, needs_anchor(*pass)));
    return outputs;
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

/// Starts the exchange of `forward_batches`, and returns while it is under way, as `SyncBatchNormImpl::begin_forward`.
[[nodiscard]] inline pending_forwards begin_forward_batches(SyncBatchNorm& norm,
                                                            std::vector<::torch::Tensor> const& inputs) {
  return pending_forwards{{detail::batches_of::passes(*norm, inputs), !detail::batches_of::are_together(*norm)}};
}

} // namespace syncnorm::torch
