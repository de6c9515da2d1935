#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/openmp.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

static_assert(host::executor<host::openmp_executor>);

TEST_CASE("an OpenMP team runs each piece of work once") {
  host::openmp_executor const exec{3};
  CHECK(exec.concurrency() == 3);
  for (std::int64_t const n : {0, 1, 100}) {
    std::vector<std::atomic<int>> times(static_cast<std::size_t>(n));
    exec.for_each(n, [&](std::int64_t i) { ++times[static_cast<std::size_t>(i)]; });
    for (auto const& t : times) CHECK(t == 1);
  }
}

TEST_CASE("what a piece of work throws in an OpenMP team is thrown when all have returned") {
  host::openmp_executor const exec{3};
  std::atomic<int> done = 0;
  auto const failing = [&](std::int64_t i) {
    ++done;
    if (i % 40 == 7) throw std::runtime_error{"no memory"};
  };
  CHECK_THROWS_WITH_AS(host::executor_ref{exec}.for_each(100, failing), "no memory", std::runtime_error);
  CHECK(done == 100);
}

TEST_CASE("an OpenMP team gives the bits of one thread") {
  test::tensor<float> x{test::arrangement::nchw, 40, 3, 2000, test::deviates<float>(40, 3, 2000, 1)};
  std::vector<double> mean(3), m2(3), mean_one(3), m2_one(3);
  host::local_moments(host::openmp_executor{4}, x.input(), mean, m2);
  host::local_moments(host::serial_executor{}, x.input(), mean_one, m2_one);
  CHECK(mean == mean_one);
  CHECK(m2 == m2_one);
}
