// Plain C++ with the CUDA runtime, which needs no GPU to say its version, nor to make a communicator.

#include <cstdio>

#include <cuda_runtime_api.h>

#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/self.hpp>

#ifdef WITH_LAYER
bool can_make_a_layer(); // or says what is missing
#else
bool can_make_a_layer() { return true; }
#endif

int main() {
  int version = 0;
  syncnorm::detail::require_cuda(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  syncnorm::staged const comm{syncnorm::self_communicator{}};
  std::printf("CUDA runtime %d, %d rank\n", version, comm.size());
  return version >= 12000 && comm.size() == 1 && can_make_a_layer() ? 0 : 1;
}
