// One process, the only rank of its world.

#include <cstdint>
#include <cstdio>
#include <span>

#include <syncnorm/adapters/mpi.hpp>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::int64_t value = 7;
  {
    syncnorm::mpi_communicator const comm{MPI_COMM_WORLD};
    syncnorm::allreduce(comm, std::span{&value, 1}, std::span{&value, 1});
  }
  MPI_Finalize();
  std::printf("sum over the ranks: %d\n", static_cast<int>(value));
  return value == 7 ? 0 : 1;
}
