#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <syncnorm/core/error.hpp>

#include "record.hpp"

namespace train_cifar {

/// max |a - b| over max |b|: the difference relative to the scale of the values. Infinite where a value is no number.
[[nodiscard]] inline double relative_difference(std::vector<double> const& a, std::vector<double> const& b) {
  double difference = 0, scale = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  return difference == 0 ? 0 : difference / scale;
}

/// How far two runs that differ in rounding alone may be apart after `step` steps: the rounding error of a sum of n terms
/// is below 4 sqrt(n) roundoffs but for one sum in some thousand, and a step carries on the errors of the ones before it.
/// Where two elements are so close that rounding decides which is the maximum of a pool, or one is so close to 0 that it
/// decides whether ReLU lets it through, gradients differ by more. In float that befalls some runs, in double none.
/// Source: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019.
[[nodiscard]] inline double rounding_tolerance(run_record const& record, std::size_t step) {
  return 4 * record.roundoff * std::sqrt(static_cast<double>(record.longest_sum)) * static_cast<double>(step);
}

/// Prints by how much each quantity of each step differs. Returns whether all are within `rounding_tolerance`. Throws
/// syncnorm::error where the records are not of the same steps of the same work.
[[nodiscard]] inline bool compare_records(run_record const& record, run_record const& reference) {
  if (record.entries.size() != reference.entries.size() || record.roundoff != reference.roundoff ||
      record.longest_sum != reference.longest_sum || record.entries.empty())
    throw syncnorm::error{"the records are not of the same work"};

  std::map<std::size_t, std::map<std::string, double>> steps;
  for (std::size_t i = 0; i < record.entries.size(); ++i) {
    auto const &a = record.entries[i], &b = reference.entries[i];
    if (a.step != b.step || a.quantity != b.quantity || a.values.size() != b.values.size())
      throw syncnorm::error{"entry " + std::to_string(i + 1) + " is " + a.quantity + " of step " +
                            std::to_string(a.step) + " in one record, " + b.quantity + " of step " +
                            std::to_string(b.step) + " in the other"};
    double& worst = steps[a.step][a.quantity];
    worst = std::max(worst, relative_difference(a.values, b.values));
  }

  std::printf("%-6s", "step");
  for (auto const& [quantity, difference] : steps.begin()->second) std::printf("  %10s", quantity.c_str());
  std::printf("  %10s\n", "tolerance");
  bool agree = true;
  double largest = 0;
  for (auto const& [step, quantities] : steps) {
    std::printf("%-6zu", step);
    double const tolerance = rounding_tolerance(record, step);
    for (auto const& [quantity, difference] : quantities) {
      std::printf("  %10.2g", difference);
      agree = agree && difference <= tolerance;
      largest = std::max(largest, difference);
    }
    std::printf("  %10.2g\n", tolerance);
  }
  bool const is_double = record.roundoff == 0x1p-53;
  std::printf("largest relative difference %.2g: %s\n", largest,
              agree ? "the runs agree to rounding"
              : is_double
                  ? "THE RUNS DISAGREE"
                  : "the runs disagree, or rounding has decided a maximum or a ReLU: compare records in double");
  return agree;
}

} // namespace train_cifar
