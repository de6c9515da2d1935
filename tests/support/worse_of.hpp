#pragma once

#include <algorithm>
#include <limits>

namespace test {

/// The greater of the two; infinite where `difference` is no number, which every comparison with it would else leave out.
template <class T>
[[nodiscard]] constexpr T worse_of(T worst, T difference) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  return difference < infinity ? std::max(worst, difference) : infinity;
}
static_assert(worse_of(worse_of(0.0, std::numeric_limits<double>::quiet_NaN()), 1.0) > 1);

} // namespace test
