#pragma once

#include <array>
#include <cstddef>

#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Σ in_j·scale_j + (x − center)·scale + shift, x being the last of the inputs. The coefficients are scale_j…, scale, center, shift.
template <std::size_t Inputs>
struct linear_op {
  static constexpr std::size_t inputs = Inputs, outputs = 1, coefficients = inputs + 2;
  static constexpr bool takes_mask = false;

  template <class V, class Lanes>
  [[gnu::always_inline]] static std::array<V, outputs> apply(std::array<V, inputs> const& in,
                                                             std::array<V, coefficients> const& k, Lanes const&) {
    V sum = multiply_add<V>(in[inputs - 1] - k[inputs], k[inputs - 1], k[inputs + 1]);
#pragma GCC unroll 8
    for (std::size_t j = 1; j < inputs; ++j) sum = multiply_add<V>(in[inputs - 1 - j], k[inputs - 1 - j], sum);
    return {sum};
  }
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
