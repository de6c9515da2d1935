#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace test {

/// Runs work on threads of its own, in an order drawn from a seed.
struct shuffling_executor {
  int threads = 3;
  unsigned seed = 1;

  [[nodiscard]] int concurrency() const { return threads; }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    std::vector<std::int64_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937{seed});
    std::atomic<std::size_t> next = 0;
    auto const work = [&] {
      for (std::size_t i = next++; i < order.size(); i = next++) f(order[i]);
    };
    std::vector<std::jthread> team;
    for (int t = 1; t < threads; ++t) team.emplace_back(work);
    work();
  }
};

/// Runs all work on the calling thread, in the opposite order, however many threads it says there are.
struct lone_executor {
  int threads = 4;

  [[nodiscard]] int concurrency() const { return threads; }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = n; i-- > 0;) f(i);
  }
};

} // namespace test
