#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/plan.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// Bytes of the workspace for the passes of C channels, of any extents, strides and element type.
[[nodiscard]] constexpr std::size_t workspace_bytes(std::int64_t channels, device_limits const& limits) {
  // A reduction of several pieces has at most so many blocks along channels, each of which leaves at most 5 numbers of 64
  // channels, and four times as many along positions, which leave as many numbers of one. A group of one piece leaves nothing.
  std::int64_t const blocks = detail::most_resident * limits.multiprocessors;
  return detail::workspace_layout::ticket_bytes(std::max<std::int64_t>(channels, 0)) +
         static_cast<std::size_t>(blocks) * 5 * 64 * sizeof(double);
}

} // namespace syncnorm::cuda
