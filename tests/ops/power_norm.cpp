#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>

#include <ops/power_norm_run.hpp>

namespace {

template <class T>
void check_run(test::power_norm_case const& c) {
  test::power_norm_data<T> const data{c};
  std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(c.cell.ranks));
  syncnorm::run_ranks(c.cell.ranks, [&](syncnorm::thread_communicator const& comm) {
    failures[static_cast<std::size_t>(comm.rank())] = test::run_power_norm(data, comm);
  });
  for (auto const& of_rank : failures)
    for (auto const& failure : of_rank) FAIL_CHECK(failure);
}

} // namespace

TEST_CASE_TEMPLATE("power norm over threads is the reference on the whole batch, at every step", T, float, double) {
  for (int const ranks : {1, 2, 3, 4, 7}) test::for_each_power_norm_case(ranks, check_run<T>);
}

TEST_CASE_TEMPLATE("power norm of one rank needs no group", T, float, double) {
  for (auto const order : test::layouts) {
    test::power_norm_case c{{1, 6, 4, order == test::layout::nc ? 1 : 9, test::partition::even, order}};
    c.groups = 3;
    test::power_norm_data<T> const data{c};
    for (auto const& failure : test::run_power_norm(data, syncnorm::self_communicator{})) FAIL_CHECK(failure);
  }
}
