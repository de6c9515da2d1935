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
  return detail::workspace_layout::ticket_bytes(std::max<std::int64_t>(channels, 0)) +
         static_cast<std::size_t>(detail::room_for_parts(limits)) * sizeof(double);
}

} // namespace syncnorm::cuda
