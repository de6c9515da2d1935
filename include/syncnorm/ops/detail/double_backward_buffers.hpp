#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <syncnorm/core/combination.hpp>

namespace syncnorm::detail {

/// Buffers of a double backward pass, whose sums are `[C]` each, with x − mean in the place of x̂.
struct double_backward_buffers {
  enum row : std::size_t { g, g_xmu, u, u_xmu, u_g, a_g, a_g_xmu, rows };

  std::vector<double> own, all, more; ///< rows·C: of this rank, of all ranks, and of one micro-batch
  std::vector<combination> for_dy, for_x;

  void prepare(std::size_t channels) {
    for (auto* const sums : {&own, &all, &more}) sums->assign(rows * channels, 0.0);
    for_dy.resize(channels);
    for_x.resize(channels);
  }
  [[nodiscard]] static std::span<double> of(std::vector<double>& sums, row which) {
    auto const channels = sums.size() / rows;
    return std::span{sums}.subspan(which * channels, channels);
  }
};

} // namespace syncnorm::detail
