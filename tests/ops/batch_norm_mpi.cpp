#include <chrono>

#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

#include <ops/batch_norm_processes.hpp>

TEST_CASE("batch norm over MPI processes agrees with the oracle on the whole batch") {
  test::check_batch_norm_over_processes(
      syncnorm::mpi_communicator::duplicate(MPI_COMM_WORLD, std::chrono::seconds{600}));
}
