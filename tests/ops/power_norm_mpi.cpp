#include <chrono>

#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

#include <ops/power_norm_processes.hpp>

TEST_CASE("power norm over MPI processes is the reference on the whole batch") {
  test::check_power_norm_over_processes(
      syncnorm::mpi_communicator::duplicate(MPI_COMM_WORLD, std::chrono::seconds{600}));
}
