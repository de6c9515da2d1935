#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/begin_together.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/pending_outputs.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/epilogue.hpp>
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
  [[nodiscard]] static std::vector<std::unique_ptr<forward_pass>>
  passes(SyncBatchNormImpl& norm, std::vector<at::Tensor> const& batches, std::vector<norm_epilogue> epilogues) {
    auto const fault = complete_epilogues(epilogues, batches.size());
    std::vector<forward_inputs> inputs;
    if (are_together(norm) || batches.empty())
      inputs.push_back(norm.inputs_of(batches, std::move(epilogues)));
    else
      for (std::size_t k = 0; k < batches.size(); ++k) inputs.push_back(norm.inputs_of({batches[k]}, {epilogues[k]}));
    std::vector<backward_pass> backward;
    std::vector<std::string> faults;
    for (auto const& each : inputs) {
      backward.push_back(backward_of(at::GradMode::is_enabled(), each.requires_grad()));
      faults.push_back(fault_or_thrown(
          [&] { return fault.empty() ? find_shared_in_place(each, inputs, "another micro-batch") : fault; }));
    }
    std::vector<std::unique_ptr<forward_pass>> passes;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      passes.push_back(make_pass_anywhere(std::move(inputs[i]), backward[i], std::move(faults[i])));
    return passes;
  }

  [[nodiscard]] static std::vector<at::Tensor> forward(SyncBatchNormImpl& norm, std::vector<at::Tensor> const& batches,
                                                       std::vector<norm_epilogue> const& epilogues) {
    auto const all = passes(norm, batches, epilogues);
    if (are_together(norm)) {
      all.front()->run();
      return record(all, false, needs_anchor(*all.front()));
    }
    { // whose faults come before the first of them writes
      at::AutoGradMode const no_recording{false};
      complete(*begin_together(all, false), all, [] {});
    }
    std::vector<at::Tensor> outputs;
    for (auto const& pass : all) outputs.push_back(record({&pass, 1}, false, needs_anchor(*pass)).front());
    return outputs;
  }
};

} // namespace detail

/// The outputs of K micro-batches by one statistic, that of all of them on all ranks: what `norm` would make of their
/// concatenation, cut up again, with one exchange forward and one backward. In training mode collective; K may differ
/// between ranks, but is at least 1: a rank without samples passes one micro-batch of none. `epilogues`: none, or one for each,
/// as of `SyncBatchNormImpl::forward_with`. In place, no input may be in the memory of another one or of the other one's
/// residual. In evaluation mode, and by frozen statistics, `forward_with` of each.
inline std::vector<::torch::Tensor> forward_batches(SyncBatchNorm& norm, std::vector<::torch::Tensor> const& inputs,
                                                    std::vector<norm_epilogue> const& epilogues = {}) {
  return detail::batches_of::forward(*norm, inputs, epilogues);
}

/// Starts the exchange of `forward_batches`, and returns while it is under way, as `SyncBatchNormImpl::begin_forward`.
[[nodiscard]] inline pending_forwards begin_forward_batches(SyncBatchNorm& norm,
                                                            std::vector<::torch::Tensor> const& inputs,
                                                            std::vector<norm_epilogue> const& epilogues = {}) {
  return pending_forwards{{detail::batches_of::passes(*norm, inputs, epilogues), false}};
}

} // namespace syncnorm::torch
