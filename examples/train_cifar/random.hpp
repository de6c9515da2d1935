#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace train_cifar {

/// The generator SplitMix64. Unlike the distributions of the standard library, what is drawn from it is the same with
/// every compiler. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
class random_source {
public:
  explicit random_source(std::uint64_t seed, std::uint64_t stream = 0) : state_{seed + 0x632be59bd9b4e019u * stream} {
    (*this)();
  }

  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// Uniform in [low, high).
  float uniform(float low, float high) { return low + (high - low) * (static_cast<float>((*this)() >> 40) * 0x1p-24f); }
  /// Uniform in [0, bound), for bounds far below 2^32.
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(((*this)() >> 32) * bound >> 32); }

private:
  std::uint64_t state_;
};

/// The numbers [0, count) in an order that `source` decides.
[[nodiscard]] inline std::vector<std::int64_t> shuffled(std::size_t count, random_source source) {
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[source.below(i)]);
  return order;
}

} // namespace train_cifar
