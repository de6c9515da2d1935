#pragma once

#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// gamma, of which the imaginary parts make it complex, `[C]` each, and beta `[C, 2]`, real and imaginary parts; an absent gamma stands for
/// real parts of 1, absent others for 0.
struct complex_affine_values {
  channel_values gamma{}, beta{}, gamma_imag{};

  /// Whether gamma turns the phases of numbers.
  [[nodiscard]] SYNCNORM_HOST_DEVICE bool turns() const { return gamma_imag.data != nullptr; }
};

/// Where their gradients are added, alike; absent ones are not needed.
struct complex_affine_outputs {
  channel_outputs gamma{}, beta{}, gamma_imag{};
};

} // namespace syncnorm::cuda
