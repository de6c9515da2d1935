#pragma once

#include <vector>

namespace syncnorm::detail {

/// Buffers of one pass.
struct pass_buffers {
  std::vector<double> first, second; ///< `[C]`: m2; or the sums of the backward pass
  std::vector<double> scratch;       ///< of one micro-batch
};

} // namespace syncnorm::detail
