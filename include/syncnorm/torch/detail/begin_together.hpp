#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/pending_passes.hpp>
#include <syncnorm/torch/detail/begun_passes.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// Passes on the CPU that have begun together.
class begun_on_cpu final : public begun_passes {
public:
  /// Passes without an exchange.
  explicit begun_on_cpu(std::vector<batch_norm_pass> alone) : alone_{std::move(alone)} {}
  explicit begun_on_cpu(pending_passes exchanged) : exchanged_{std::move(exchanged)} {}

  [[nodiscard]] bool ready() override { return !exchanged_ || exchanged_->ready(); }
  void finish(function_ref<void()> before, function_ref<void()> after) override {
    before();
    exchanged_ ? exchanged_->finish() : run_alone(alone_);
    after();
  }

private:
  std::vector<batch_norm_pass> alone_;
  std::optional<pending_passes> exchanged_;
};

/// Begins the passes, which it borrows: of one module, with the buffers of its own passes, or of a group, with those of the first.
/// Collective, unless all of them are this rank's alone, in whatever thread that is.
template <class Pass>
[[nodiscard]] std::unique_ptr<begun_passes> begin_together(std::vector<std::unique_ptr<Pass>> const& passes,
                                                           bool grouped) {
  if (auto const device = passes.front()->pass()->device) {
    std::vector<std::unique_ptr<device_plan>> plans;
    for (auto const& pass : passes) plans.push_back(pass->plan_on_device());
    return device->begin(std::move(plans), grouped);
  }
  auto& state = *passes.front()->pass()->state;
  std::vector<batch_norm_pass> plans;
  bool exchanges = false;
  for (auto const& pass : passes) exchanges |= plans.emplace_back(plan_of(*pass)).steps().collective();
  if (!exchanges) return std::make_unique<begun_on_cpu>(std::move(plans));
  if (!grouped) return std::make_unique<begun_on_cpu>(begin_pass(state.comm, std::move(plans[0]), state.workspace));
  if (!state.group) state.group.emplace(state.comm);
  return std::make_unique<begun_on_cpu>(state.group->begin(std::move(plans)));
}

} // namespace syncnorm::torch::detail
