#pragma once

namespace syncnorm {

/// One channel of out = a·scale_a + b·scale_b + (x − mean)·scale_x + shift.
struct combination {
  double scale_a = 0, scale_b = 0, mean = 0, scale_x = 0, shift = 0;
};

} // namespace syncnorm
