// batch_norm over MPI, beside the same work without exchange and MPI's own collectives. Started by mpiexec.

#include <cstddef>
#include <exception>
#include <iostream>
#include <vector>

#include <syncnorm/adapters/mpi.hpp>

#include "support/harness.hpp"
#include "support/rank_rows.hpp"

namespace {

/// The exchanges of two passes by MPI_Allgather.
std::vector<bench::contender> bare_collectives(bench::row_key const& key, std::size_t bytes) {
  return {{"collectives", [ranks = static_cast<std::size_t>(key.ranks), bytes] {
             return [in = std::vector<std::byte>(bytes), out = std::vector<std::byte>(bytes * ranks)](int) mutable {
               auto const n = static_cast<int>(in.size());
               for (int pass = 0; pass < 2; ++pass)
                 MPI_Allgather(in.data(), n, MPI_BYTE, out.data(), n, MPI_BYTE, MPI_COMM_WORLD);
             };
           }}};
}

int measure(int argc, char** argv) {
  auto const how = bench::parse(argc, argv);
  auto const comm = syncnorm::mpi_communicator::duplicate(MPI_COMM_WORLD);
  auto const comm_of = [comm](int) { return comm; };
  bench::rank_source<decltype(comm_of)> const source{
      .name = "mpi",
      .ranks = comm.size(),
      .comm_of = comm_of,
      .steps = comm.size() <= 2 ? 1000 : 100,
      .more = bare_collectives,
  };
  std::vector<bench::row> rows;
  if (comm.size() == 2) {
    bench::add_large_rows(rows, how, source);
    bench::add_grid_rows(rows, how, source);
  }
  if (comm.size() > 1 && (!how.quick || comm.size() == 4)) bench::add_policy_rows(rows, how, source);
  bench::add_scaling_row(rows, source);
  bench::process_group const group{
      .rank = comm.rank(),
      .barrier = [] { MPI_Barrier(MPI_COMM_WORLD); },
      .mean =
          [&](double seconds) {
            double sum = 0;
            MPI_Allreduce(&seconds, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
            return sum / comm.size();
          },
  };
  return bench::run(how, rows, group);
}

} // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    status = measure(argc, argv);
  } catch (std::exception const& error) {
    std::cerr << "bench.mpi: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
