// What nvcc compiles of a consumer. Without a GPU, the layer says so.

#include <cstdio>

#include <syncnorm/syncnorm.cuh>

bool can_make_a_layer() {
  int devices = 0;
  bool const has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  try {
    syncnorm::cuda::batch_norm<float> const layer{{}, 3};
    return has_gpu;
  } catch (syncnorm::cuda_error const& e) {
    std::puts(e.what());
    return !has_gpu;
  }
}
