#pragma once

#if !defined(_OPENMP)
#error "syncnorm/host/openmp.hpp needs OpenMP: compile with -fopenmp"
#endif

#include <algorithm>
#include <cstdint>

namespace syncnorm::host {

/// Runs work on a team of so many OpenMP threads, one unless it is set. OpenMP keeps the team between calls.
struct openmp_executor {
  int threads = 1;

  [[nodiscard]] int concurrency() const noexcept { return std::max(1, threads); }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
#pragma omp parallel for schedule(dynamic) num_threads(concurrency()) if (n > 1 && threads > 1)
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

} // namespace syncnorm::host
