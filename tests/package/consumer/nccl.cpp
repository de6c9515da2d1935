// Plain C++ with NCCL, which needs no GPU to say its version.

#include <cstdio>

#include <syncnorm/adapters/nccl.hpp>

int main() {
  int version = 0;
  bool const known = ncclGetVersion(&version) == ncclSuccess;
  std::printf("NCCL %d\n", version);
  bool refused = false;
  try {
    syncnorm::nccl_communicator const comm{nullptr};
  } catch (syncnorm::invalid_argument_error const&) {
    refused = true;
  }
  return known && version >= 21800 && refused ? 0 : 1;
}
