#pragma once

#if defined(__CUDACC__)
#define SYNCNORM_HOST_DEVICE __host__ __device__
#else
/// Marks a function that a CUDA compiler also compiles for the device.
#define SYNCNORM_HOST_DEVICE
#endif
