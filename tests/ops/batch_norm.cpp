#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>

#include <ops/grid.hpp>

namespace {

template <class T>
void check_grid(int ranks) {
  test::for_each_case(ranks, [&](test::grid_case const& cell) {
    test::case_data<T> const data{cell};
    std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(ranks));
    syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
      failures[static_cast<std::size_t>(comm.rank())] = test::run_case(data, comm);
    });
    for (auto const& of_rank : failures)
      for (auto const& failure : of_rank) FAIL_CHECK(failure);
  });
}

} // namespace

TEST_CASE_TEMPLATE("batch norm over threads agrees with the oracle on the whole batch", T, float, double) {
  for (int const ranks : {1, 2, 3, 4, 7}) check_grid<T>(ranks);
}

TEST_CASE_TEMPLATE("batch norm of one rank needs no group", T, float, double) {
  for (auto const order : test::layouts) {
    test::case_data<T> const data{{1, 5, 4, order == test::layout::nc ? 1 : 50, test::partition::even, order}};
    for (auto const& failure : test::run_case(data, syncnorm::self_communicator{})) FAIL_CHECK(failure);
  }
}
