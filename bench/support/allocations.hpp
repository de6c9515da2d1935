#pragma once

#include <cstdint>

namespace bench {

/// What operator new has given out in this process, on all threads.
struct allocation_count {
  std::int64_t allocations = 0;         ///< calls so far, by the program's own code
  std::int64_t backend_allocations = 0; ///< by that of shared libraries
  std::int64_t live = 0;                ///< bytes given out and not given back
  std::int64_t peak = 0;                ///< the most that `live` has been since the last reset_peak
};

[[nodiscard]] allocation_count count_allocations();
void reset_peak();

} // namespace bench
