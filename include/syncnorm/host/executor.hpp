#pragma once

#include <concepts>
#include <cstdint>

namespace syncnorm::host {

/// Runs f(0) … f(n − 1) on the calling thread.
struct serial_executor {
  [[nodiscard]] int concurrency() const noexcept { return 1; }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

/// Runs independent pieces of work: `for_each(n, f)` calls f(i) once for each i in [0, n), in any order, possibly at
/// the same time, and returns when all have returned; `concurrency()` is how many can run at the same time. The
/// primitives give the same bits whatever the executor. Calls nothing that throws.
template <class E>
concept executor = requires(E const& exec, void (&f)(std::int64_t)) {
  { exec.concurrency() } -> std::same_as<int>;
  exec.for_each(std::int64_t{}, f);
};

} // namespace syncnorm::host
