// Compiled kernels that are those of the interpreter of tests/simt, where no nvcc has compiled any.
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/cuda/kernels.hpp>

#include "cuda/simt_kernels.hpp"

struct syncnorm::cuda::compiled_kernels : test::simt_kernels {};

template struct syncnorm::cuda::kernels_of<float>;
template struct syncnorm::cuda::kernels_of<double>;
template struct syncnorm::cuda::kernels_of<__half>;
template struct syncnorm::cuda::kernels_of<__nv_bfloat16>;
