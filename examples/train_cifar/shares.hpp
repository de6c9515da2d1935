#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace train_cifar {

/// The contiguous share of `rank` in `items`: shares differ by at most one item, the first ones being the longer.
template <class T>
[[nodiscard]] std::span<T> share_of(std::span<T> items, int rank, int ranks) {
  auto const r = static_cast<std::size_t>(rank), p = static_cast<std::size_t>(ranks);
  std::size_t const each = items.size() / p, longer = items.size() % p;
  return items.subspan(r * each + std::min(r, longer), each + (r < longer ? 1 : 0));
}

/// Fills what a scatter of equal blocks has over at its end; no sample has this index.
inline constexpr std::int64_t no_sample = -1;

/// The numbers [0, count), padded with `no_sample` to a multiple of `ranks`, so that no sample is left out.
[[nodiscard]] inline std::vector<std::int64_t> padded_indices(std::size_t count, int ranks) {
  auto const p = static_cast<std::size_t>(ranks);
  std::vector<std::int64_t> indices((count + p - 1) / p * p, no_sample);
  for (std::size_t i = 0; i < count; ++i) indices[i] = static_cast<std::int64_t>(i);
  return indices;
}

} // namespace train_cifar
