#pragma once

#include <complex>

#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/tensor_view.hpp>
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

/// The gradients with respect to what a backward pass gave: dx `[N, C, S]`, and this rank's gradients of gamma, `[C]` each part, and of
/// beta, `[C, 2]`. Absent ones stand for 0.
template <complex_component T>
struct complex_second_order_values {
  tensor_view<std::complex<T> const> dx{};
  channel_values gamma_gradient{}, beta_gradient{}, gamma_imag_gradient{};
};

} // namespace syncnorm::cuda
