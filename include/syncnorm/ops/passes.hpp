#pragma once

#include <concepts>
#include <utility>
#include <vector>

namespace syncnorm {

/// A list of passes for a `batch_norm_group`.
template <class Pass, std::same_as<Pass>... More>
[[nodiscard]] std::vector<Pass> passes(Pass first, More... more) {
  std::vector<Pass> all;
  all.reserve(1 + sizeof...(more));
  all.push_back(std::move(first));
  (all.push_back(std::move(more)), ...);
  return all;
}

} // namespace syncnorm
