#pragma once

#include <type_traits>

#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::host {

/// Float of std::complex<float>, and const as that is.
template <class Z>
using component_of = std::conditional_t<std::is_const_v<Z>, typename std::remove_const_t<Z>::value_type const,
                                        typename std::remove_const_t<Z>::value_type>;

/// Whether the components of a position's numbers, real part and imaginary part in turn, follow each other in memory.
template <class Z>
[[nodiscard]] constexpr bool components_follow(tensor_view<Z> const& z) {
  return z.stride_c == 1 || z.channels <= 1;
}

/// Complex channels whose `components_follow` as twice as many real ones, `[N, 2·C, S]`: that of number 2·c is the real part of channel c, and
/// the next one the imaginary part.
template <class Z>
[[nodiscard]] tensor_view<component_of<Z>> components_of(tensor_view<Z> const& z) {
  // What [complex.numbers] of the standard allows.
  auto* const data = reinterpret_cast<component_of<Z>*>(z.data);
  return {data, z.samples, 2 * z.channels, z.spatial, 2 * z.stride_n, 1, 2 * z.stride_s};
}

} // namespace syncnorm::host
