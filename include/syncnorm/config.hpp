#pragma once

#if defined(__CUDACC__)
#define SYNCNORM_HOST_DEVICE __host__ __device__
#define SYNCNORM_DEVICE __device__
#else
/// Marks a function that a CUDA compiler also compiles for the device.
#define SYNCNORM_HOST_DEVICE
/// Marks a function that a CUDA compiler compiles for the device alone.
#define SYNCNORM_DEVICE
#endif
