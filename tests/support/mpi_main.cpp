#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int const status = doctest::Context{argc, argv}.run();
  MPI_Finalize();
  return status;
}
