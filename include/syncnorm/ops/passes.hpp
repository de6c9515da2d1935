#pragma once

#include <array>
#include <concepts>
#include <ranges>
#include <utility>

namespace syncnorm {

/// A list of passes for a `batch_norm_group`.
template <class Pass, std::same_as<Pass>... More>
[[nodiscard]] std::array<Pass, 1 + sizeof...(More)> passes(Pass first, More... more) {
  return {std::move(first), std::move(more)...};
}

/// What `passes` returns, or a vector of passes.
template <class List, class Pass>
concept list_of = std::ranges::contiguous_range<List> && std::ranges::sized_range<List> &&
    std::same_as<std::ranges::range_value_t<List>, Pass>;

} // namespace syncnorm
