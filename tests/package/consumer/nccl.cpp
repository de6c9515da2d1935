// Plain C++ with NCCL, which needs no GPU to say its version.

#include <cstdio>

#include <nccl.h>

int main() {
  int version = 0;
  bool const known = ncclGetVersion(&version) == ncclSuccess;
  std::printf("NCCL %d\n", version);
  return known && version >= 21800 ? 0 : 1;
}
