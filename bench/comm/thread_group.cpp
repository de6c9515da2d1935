// batch_norm over thread_group, beside the same work without exchange.

#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>

#include "support/harness.hpp"
#include "support/rank_rows.hpp"

namespace {

/// As over a wire: large layers are cut into halves, of which one is summed while the other is exchanged.
struct in_halves : syncnorm::thread_communicator {
  explicit in_halves(syncnorm::thread_communicator const& comm) : thread_communicator{comm} {}
  [[nodiscard]] static double exchange_overhead() noexcept { return 5e-5; }
};

template <class C>
auto source_of(std::string name, int ranks) {
  auto const group = std::make_shared<syncnorm::thread_group>(ranks);
  auto const comm_of = [group](int rank) { return C{group->communicator(rank)}; };
  return bench::rank_source<decltype(comm_of)>{
      .name = std::move(name),
      .ranks = ranks,
      .comm_of = comm_of,
      .rank_threads = ranks,
      .steps = ranks <= 2 ? 1000 : 100,
  };
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv);
    auto const source = [](int ranks) { return source_of<syncnorm::thread_communicator>("thread_group", ranks); };
    std::vector<bench::row> rows;
    bench::add_large_rows(rows, how, source(2));
    bench::add_large_rows(rows, how, source_of<in_halves>("thread_group+halves", 2));
    bench::add_grid_rows(rows, how, source(2));
    for (int const ranks : {1, 2, 3, 4}) bench::add_scaling_row(rows, source(ranks));
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.comm: " << error.what() << '\n';
    return 1;
  }
}
