#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace train_cifar {

/// The mean of the values between the 10th and the 90th percentile: of n sorted values, the first and the last
/// floor(n/10) are left out. 0 where there are none.
[[nodiscard]] inline double mean_between_percentiles(std::span<double const> values) {
  if (values.empty()) return 0;
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  std::size_t const cut = sorted.size() / 10;
  auto const kept = std::span{sorted}.subspan(cut, sorted.size() - 2 * cut);
  return std::accumulate(kept.begin(), kept.end(), 0.0) / static_cast<double>(kept.size());
}

/// The most memory that this process has held so far, in bytes (VmHWM); 0 where the system does not say.
[[nodiscard]] inline std::int64_t peak_memory() {
  std::ifstream status{"/proc/self/status"};
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return 1024 * std::stoll(line.substr(6));
  return 0;
}

} // namespace train_cifar
