#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include <syncnorm/comm/wire.hpp>

namespace syncnorm::detail {

/// out[i] = ((x_0[i] ⊕ x_1[i]) ⊕ x_2[i]) ⊕ …, where x_r = contribution(r), r < size. Any contribution may be `out`.
template <reducible_type T, class Contribution>
void fold_in_rank_order(std::span<T> out, int size, reduce_op op, Contribution contribution) {
  std::array<T, 512> block;
  for (std::size_t first = 0; first < out.size(); first += block.size()) {
    auto const n = std::min(block.size(), out.size() - first);
    std::copy_n(contribution(0) + first, n, block.begin());
    for (int r = 1; r < size; ++r)
      reduce_into(std::span<T>{block.data(), n}, std::span<T const>{contribution(r) + first, n}, op);
    std::copy_n(block.begin(), n, out.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

} // namespace syncnorm::detail
