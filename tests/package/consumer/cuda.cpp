// Plain C++ with the CUDA runtime, which needs no GPU to say its version.

#include <cstdio>

#include <syncnorm/core/detail/cuda_check.hpp>

int main() {
  int version = 0;
  syncnorm::detail::require_cuda(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  std::printf("CUDA runtime %d\n", version);
  return version >= 12000 ? 0 : 1;
}
