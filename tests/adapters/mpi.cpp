#define DOCTEST_CONFIG_IMPLEMENT
#include <chrono>

#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

#include "comm/contract.hpp"

using namespace std::chrono_literals;
using syncnorm::mpi_communicator;

TEST_CASE("mpi_communicator keeps the contract") {
  contract::check_contract(mpi_communicator{MPI_COMM_WORLD, 60s});
  contract::check_contract(mpi_communicator::duplicate(MPI_COMM_WORLD, 60s));
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int const failed = doctest::Context{argc, argv}.run();
  MPI_Finalize();
  return failed;
}
