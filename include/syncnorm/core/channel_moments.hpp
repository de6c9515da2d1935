#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace syncnorm {

/// Merges the moments of `more` further elements of each channel into those of `count`: `merge`, for all channels at once.
///
/// Shapes: all `[C]`, and apart from each other.
inline void merge_channels(std::int64_t count, std::span<double> mean, std::span<double> m2, std::int64_t more,
                           std::span<double const> mean_more, std::span<double const> m2_more) {
  if (more == 0) return;
  if (count == 0) {
    std::ranges::copy(mean_more, mean.begin());
    std::ranges::copy(m2_more, m2.begin());
    return;
  }
  double const share = static_cast<double>(more) / static_cast<double>(count + more);
  double const weight = static_cast<double>(count) * share;
  double* __restrict const to_mean = mean.data(), * __restrict const to_m2 = m2.data();
  for (std::size_t c = 0; c < mean.size(); ++c) {
    double const delta = mean_more[c] - to_mean[c];
    to_mean[c] += delta * share;
    to_m2[c] += m2_more[c] + delta * delta * weight;
  }
}

} // namespace syncnorm
