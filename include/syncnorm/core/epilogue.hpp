#pragma once

#include <cstdint>

#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm {

/// f(v) = v where v > 0, and v·negative_slope elsewhere: the identity by a slope of 1, ReLU by 0, leaky ReLU by another,
/// of any sign; or there, if it is exponential, (eᵛ − 1)·negative_slope: ELU (Clevert et al. 2016). At 0 the gradient is the slope;
/// what is no number stays so.
struct activation {
  double negative_slope = 1;
  bool exponential = false;

  [[nodiscard]] static constexpr activation identity() { return {1}; }
  [[nodiscard]] static constexpr activation relu() { return {0}; }
  [[nodiscard]] static constexpr activation leaky_relu(double slope = 0.01) { return {slope}; }
  [[nodiscard]] static constexpr activation elu(double alpha = 1) { return {alpha, true}; }

  [[nodiscard]] constexpr bool is_identity() const { return negative_slope == 1 && !exponential; }

  friend bool operator==(activation const&, activation const&) = default;
};

/// What becomes of the outputs of positions that a mask leaves out. Normalized, they depend on the statistics, which they
/// have no part in; so their gradients count, and x has to be finite there.
enum class masked_outputs : std::uint8_t { normalized, zero };

/// What a pass does besides normalizing, in the same reading of memory:
///
///     y = f(gamma·(x − mean)·inv_std + beta + residual)     or 0
///
/// where mean and inv_std are of the positions that count alone. The backward pass gets the same as the forward pass.
template <class T>
struct batch_norm_epilogue {
  syncnorm::activation activation{};
  tensor_view<T const> residual{}; ///< `[N, C, S]`; a default view: none
  mask_view mask{};                ///< `[N, S]`; a default mask: none. May be on some ranks alone
  masked_outputs masked = masked_outputs::normalized;

  [[nodiscard]] constexpr bool has_residual() const { return residual.is_given(); }
  /// Whether outputs are anything but normalized inputs, and their gradients.
  [[nodiscard]] constexpr bool does_something() const { return !activation.is_identity() || has_residual() || mask; }
};

} // namespace syncnorm
