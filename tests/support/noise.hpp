#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// A reproducible value in [-1, 1) for element `index` of stream `stream`.
inline double noise(std::uint64_t stream, std::uint64_t index) {
  std::uint64_t z = stream * 0x9E3779B97F4A7C15ULL + index + 0xD1B54A32D192ED03ULL;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
  z ^= z >> 31U;
  return static_cast<double>(z >> 11U) * 0x1p-52 - 1.0;
}

inline std::vector<double> noise_vector(std::uint64_t stream, std::size_t size, double mean = 0) {
  std::vector<double> values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = mean + noise(stream, i);
  return values;
}

} // namespace test
