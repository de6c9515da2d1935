#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "vectors_of_source.hpp"

TEST_CASE("sources for different processors are of one program") {
  std::vector<float> row(1000);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = std::sin(static_cast<float>(i)) + 3;
  long double mean = 0, m2 = 0;
  for (float const x : row) mean += x;
  mean /= static_cast<long double>(row.size());
  for (float const x : row) m2 += (x - mean) * (x - mean);
  auto const any = vectors_of_source::here(row), native = of_this_machine(row);
  CHECK((any.bytes == native.bytes) == (any.sums == native.sums));
  for (auto const& found : {any, native}) {
    CHECK(std::abs(found.mean - static_cast<double>(mean)) < 1e-6);
    CHECK(std::abs(found.m2 / static_cast<double>(m2) - 1) < 1e-5);
  }
}
