#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/running_statistics.hpp>

TEST_CASE_TEMPLATE("running statistics move by their weight", P, float, double) {
  std::vector<P> running{1, -2, 8};
  std::vector<double> const value{3, 2, 8};
  syncnorm::host::update_running(std::span{running}, std::span<double const>{value}, 0.25);
  CHECK(running == std::vector<P>{1.5, -1, 8});
  syncnorm::host::update_running(std::span{running}, std::span<double const>{value}, 0);
  CHECK(running == std::vector<P>{1.5, -1, 8});
  syncnorm::host::update_running(std::span{running}, std::span<double const>{value}, 1);
  CHECK(running == std::vector<P>{3, 2, 8});
}

TEST_CASE("running statistics of float are computed in double") {
  std::vector<float> running{16777216};
  std::vector<double> const value{16777219};
  syncnorm::host::update_running(std::span{running}, std::span<double const>{value}, 0.5);
  CHECK(running[0] == static_cast<float>(16777217.5));
}
