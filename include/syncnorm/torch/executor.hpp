#pragma once

#include <cstdint>

#include <ATen/Parallel.h>

namespace syncnorm::torch {

/// Runs work on libtorch's intra-op threads, as many as `at::get_num_threads()`. Where libtorch uses OpenMP, these are
/// the threads of sources compiled with -fopenmp; in others the work runs on the calling thread.
struct at_executor {
  [[nodiscard]] int concurrency() const noexcept { return at::get_num_threads(); }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    at::parallel_for(0, n, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) f(i);
    });
  }
};

} // namespace syncnorm::torch
