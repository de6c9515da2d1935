#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/begin_together.hpp>
#include <syncnorm/torch/detail/begun_passes.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>

namespace syncnorm::torch::detail {

/// Completes passes that have begun, and then, where these are, calls `then`.
inline void complete(begun_passes& begun, std::vector<std::unique_ptr<forward_pass>> const& passes,
                     function_ref<void()> then) {
  bool under_way = false;
  try {
    begun.finish(
        [&] {
          for (auto const& pass : passes) pass->before();
          under_way = true;
        },
        [&] {
          for (auto const& pass : passes) pass->after();
          then();
        });
  } catch (...) {
    if (under_way)
      for (auto const& pass : passes) pass->fail();
    throw;
  }
}

/// Forward passes whose exchange is under way, and what they will give.
///
/// Outputs are recorded when passes begin, which they do in the same order on every rank: then autograd runs their backward
/// passes in the same order, too, whatever order ranks finish them in. Whether some rank needs gradients is not known at that
/// time. Where none does, outputs are detached in the end. Passes in place are recorded when they are finished, since until
/// then their inputs are what they were.
class pending_outputs {
public:
  using passes_type = std::vector<std::unique_ptr<forward_pass>>;

  /// Of one module, or of a group; several of one module are of this rank alone. Collective in training.
  pending_outputs(passes_type passes, bool grouped) : passes_{std::move(passes)} {
    begun_ = begin_together(passes_, grouped);
    grouped_ = grouped;
    in_place_ = any([](forward_pass const& pass) { return pass.inputs().in_place; });
    if (in_place_) return;
    anchored_ = any([](forward_pass const& pass) { return pass.inputs().scope == statistics_scope::all_ranks; }) &&
                !any([](forward_pass const& pass) { return pass.inputs().requires_grad(); });
    // A fault of this rank, which leaves nothing to record, is what `finish` throws.
    if (any([](forward_pass const& pass) { return pass.outputs().empty(); })) return;
    outputs_ = recorded();
  }
  pending_outputs(pending_outputs&& other) noexcept
      : passes_{std::move(other.passes_)}, outputs_{std::move(other.outputs_)}, grouped_{other.grouped_},
        in_place_{other.in_place_}, anchored_{other.anchored_}, done_{std::exchange(other.done_, true)},
        begun_{std::move(other.begun_)} {}
  pending_outputs& operator=(pending_outputs&& other) noexcept {
    if (this == &other) return *this;
    begun_.reset(); // waits, before what it borrows goes
    passes_ = std::move(other.passes_);
    outputs_ = std::move(other.outputs_);
    begun_ = std::move(other.begun_);
    grouped_ = other.grouped_;
    in_place_ = other.in_place_;
    anchored_ = other.anchored_;
    done_ = std::exchange(other.done_, true);
    return *this;
  }

  [[nodiscard]] bool ready() { return begun_ == nullptr || begun_->ready(); }

  /// Completes the passes, and returns their outputs. Once.
  [[nodiscard]] std::vector<at::Tensor> finish() {
    if (std::exchange(done_, true)) throw invalid_argument_error{"finish: this pass is finished already"};
    at::AutoGradMode const no_recording{false};
    complete(*begun_, passes_, [&] { settle(); });
    begun_->hand_over(outputs_);
    // What is kept of the passes from here on, autograd keeps.
    begun_.reset();
    passes_.clear();
    return std::move(outputs_);
  }

private:
  /// Records outputs of passes in place, and detaches others of which no rank needs a gradient.
  void settle() {
    bool const needed = any([](forward_pass const& pass) { return pass.pass()->saved.backward_needed; });
    if (in_place_) {
      anchored_ = needed && !any([](forward_pass const& pass) { return pass.inputs().requires_grad(); });
      at::AutoGradMode const recording{passes_.front()->records()};
      outputs_ = recorded();
    } else if (anchored_ && !needed) {
      for (auto& output : outputs_) output = output.detach();
    }
  }

  [[nodiscard]] bool any(bool (*holds)(forward_pass const&)) const {
    return std::ranges::any_of(passes_, [&](auto const& pass) { return holds(*pass); });
  }

  [[nodiscard]] std::vector<at::Tensor> recorded() const {
    if (grouped_ || passes_.front()->outputs().size() != 1) return record(passes_, grouped_, anchored_);
    std::vector<at::Tensor> each;
    for (auto const& pass : passes_) each.push_back(record({&pass, 1}, false, anchored_).front());
    return each;
  }

  passes_type passes_;
  std::vector<at::Tensor> outputs_;
  bool grouped_ = false, in_place_ = false, anchored_ = false, done_ = false;
  std::unique_ptr<begun_passes> begun_; // last, so that it goes first, and waits while there is what it borrows
};

} // namespace syncnorm::torch::detail
