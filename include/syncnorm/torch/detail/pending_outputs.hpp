#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/pending_passes.hpp>
#include <syncnorm/torch/detail/begin_together.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/group_function.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>

namespace syncnorm::torch::detail {

/// Forward passes whose exchange is under way, and what they will give.
///
/// Outputs are recorded when passes begin, which they do in the same order on every rank: then autograd runs their backward
/// passes in the same order, too, whatever order ranks finish them in. Whether some rank needs gradients is not known at that
/// time. Where none does, outputs are detached in the end.
class pending_outputs {
public:
  using passes_type = std::vector<std::unique_ptr<forward_pass>>;

  /// Of one module, with the buffers of its own passes. Collective in training.
  explicit pending_outputs(std::unique_ptr<forward_pass> pass) {
    auto& state = *pass->inputs().state;
    auto plan = plan_of(*pass);
    if (plan.steps().collective())
      exchange_.emplace(begin_pass(state.comm, std::move(plan), state.workspace));
    else
      plans_.push_back(std::move(plan));
    passes_.push_back(std::move(pass));
    if (prepare_record()) outputs_.push_back(record(*passes_.front(), anchored_));
  }
  /// Of a group, with the buffers of the first.
  explicit pending_outputs(passes_type passes) : passes_{std::move(passes)} {
    for (auto const& pass : passes_) plans_.push_back(plan_of(*pass));
    exchange_ = begin_together(*passes_.front()->inputs().state, plans_);
    if (prepare_record()) outputs_ = record_group(passes_, anchored_);
  }
  pending_outputs(pending_outputs&&) = default;
  pending_outputs& operator=(pending_outputs&& other) noexcept {
    exchange_.reset(); // waits, before what it borrows goes
    plans_ = std::move(other.plans_);
    passes_ = std::move(other.passes_);
    outputs_ = std::move(other.outputs_);
    exchange_ = std::move(other.exchange_);
    anchored_ = other.anchored_;
    done_ = other.done_;
    return *this;
  }

  [[nodiscard]] bool ready() { return !exchange_ || exchange_->ready(); }

  /// Completes the passes, and returns their outputs. Once.
  [[nodiscard]] std::vector<at::Tensor> finish() {
    if (std::exchange(done_, true)) throw invalid_argument_error{"finish: this pass is finished already"};
    at::AutoGradMode const no_recording{false};
    for (auto const& pass : passes_) pass->before();
    exchange_ ? exchange_->finish() : run_alone(plans_);
    for (auto const& pass : passes_) pass->after();
    if (anchored_ && !any([](forward_pass const& pass) { return pass.pass()->saved.backward_needed; }))
      for (auto& output : outputs_) output = output.detach();
    return std::move(outputs_);
  }

private:
  [[nodiscard]] bool any(bool (*holds)(forward_pass const&)) const {
    return std::ranges::any_of(passes_, [&](auto const& pass) { return holds(*pass); });
  }

  /// Whether there is something to record: a fault is what `finish` throws.
  [[nodiscard]] bool prepare_record() {
    anchored_ = exchange_ && !any([](forward_pass const& pass) { return pass.inputs().requires_grad(); });
    return !any([](forward_pass const& pass) { return pass.outputs().empty(); });
  }

  passes_type passes_;
  std::vector<at::Tensor> outputs_;
  bool anchored_ = false, done_ = false;
  std::vector<batch_norm_pass> plans_;     // of passes without an exchange
  std::optional<pending_passes> exchange_; // last, so that it goes first, and waits while there is what it borrows
};

} // namespace syncnorm::torch::detail
