#pragma once

#include <cstdint>
#include <stdexcept>

namespace test {

/// Runs out of something at its `failing` use.
struct failing_executor {
  int* uses;
  int failing;

  [[nodiscard]] int concurrency() const { return 1; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    if (++*uses == failing) throw std::runtime_error{"no threads"};
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

} // namespace test
