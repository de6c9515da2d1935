#pragma once

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/cuda/gpu_kernels.cuh>
#include <syncnorm/cuda/kernels.hpp>

namespace syncnorm::cuda {

/// For the source that instantiates `kernels_of`.
struct compiled_kernels : gpu_kernels<> {};

} // namespace syncnorm::cuda
