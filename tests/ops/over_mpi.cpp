#include <chrono>

#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

#include <ops/over_processes.hpp>

namespace {

syncnorm::mpi_communicator world() {
  return syncnorm::mpi_communicator::duplicate(MPI_COMM_WORLD, std::chrono::seconds{600});
}

} // namespace

TEST_CASE("batch norm over MPI processes agrees with the oracle on the whole batch") {
  test::check_batch_norm_over_processes(world());
}

TEST_CASE("power norm over MPI processes is the reference on the whole batch") {
  test::check_power_norm_over_processes(world());
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int const status = doctest::Context{argc, argv}.run();
  MPI_Finalize();
  return status;
}
