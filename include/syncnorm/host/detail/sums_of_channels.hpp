#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Where some sums of consecutive channels are.
template <std::size_t Sums>
using sums_of_channels = std::array<double*, Sums>;

/// Those from a channel on.
template <std::size_t Sums>
[[nodiscard]] constexpr sums_of_channels<Sums> from_channel(sums_of_channels<Sums> of, std::int64_t first) {
  for (auto& each : of) each += first;
  return of;
}

/// Those that lie one after the other, of so many channels each.
template <std::size_t Sums>
[[nodiscard]] constexpr sums_of_channels<Sums> consecutive_sums(double* at, std::int64_t channels) {
  sums_of_channels<Sums> of{};
  for (std::size_t j = 0; j < Sums; ++j) of[j] = at + static_cast<std::int64_t>(j) * channels;
  return of;
}

/// How many sums of products there are of so many values.
template <std::size_t Values>
inline constexpr std::size_t products_of = Values == 2 ? 2 : 5;

/// Adds a and a·b to the sums of such.
template <class V>
[[gnu::always_inline]] inline void add_products(std::array<V, 2>& to, std::array<V, 2> const& of) {
  auto const& [a, b] = of;
  to[0] += a;
  to[1] = multiply_add<V>(a, b, to[1]);
}

/// Adds a, a·b, c, c·b and c·a.
template <class V>
[[gnu::always_inline]] inline void add_products(std::array<V, 5>& to, std::array<V, 3> const& of) {
  auto const& [a, b, c] = of;
  to[0] += a;
  to[1] = multiply_add<V>(a, b, to[1]);
  to[2] += c;
  to[3] = multiply_add<V>(c, b, to[3]);
  to[4] = multiply_add<V>(c, a, to[4]);
}

/// Makes up for a b that was too large by `excess` in such sums of channel `c`.
template <std::size_t Sums>
inline void take_off(sums_of_channels<Sums> const& of, std::int64_t c, double excess) {
  for (std::size_t j = 1; j < Sums; j += 2) of[j][c] = multiply_add(-excess, of[j - 1][c], of[j][c]);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
