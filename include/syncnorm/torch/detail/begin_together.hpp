#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/pending_passes.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>

namespace syncnorm::torch::detail {

/// Begins the described passes of a group over `state`, unless all of them are this rank's alone, in whatever thread that is.
[[nodiscard]] inline std::optional<pending_passes> begin_together(exchange_state& state,
                                                                  std::vector<batch_norm_pass>& plans) {
  bool exchanges = false;
  for (auto const& plan : plans) exchanges = exchanges || plan.steps().collective();
  if (!exchanges) return std::nullopt;
  if (!state.group) state.group.emplace(state.comm);
  return state.group->begin(std::move(plans));
}

} // namespace syncnorm::torch::detail
