// batch_norm over thread_group, beside the same work without exchange.

#include <algorithm>
#include <exception>
#include <iostream>
#include <memory>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>

#include "support/harness.hpp"
#include "support/rank_rows.hpp"

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv);
    auto const source = [](int ranks) {
      auto const group = std::make_shared<syncnorm::thread_group>(ranks);
      auto const comm_of = [group](int rank) { return group->communicator(rank); };
      return bench::rank_source<decltype(comm_of)>{
          .name = "thread_group",
          .ranks = ranks,
          .comm_of = comm_of,
          .rank_threads = ranks,
          .steps = ranks <= 2 ? 1000 : 100,
      };
    };
    std::vector<bench::row> rows;
    bench::add_large_rows(rows, how, source(2));
    bench::add_grid_rows(rows, how, source(2));
    for (int const ranks : {1, 2, 3, 4}) bench::add_scaling_row(rows, source(ranks));
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.comm: " << error.what() << '\n';
    return 1;
  }
}
