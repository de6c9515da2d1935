#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace syncnorm::torch::detail {

/// libtorch's current stream on a CUDA device. In a backward pass autograd has made that the stream of the forward pass.
[[nodiscard]] inline cudaStream_t current_stream(at::Device of) {
  return c10::cuda::getCurrentCUDAStream(of.index()).stream();
}

} // namespace syncnorm::torch::detail
