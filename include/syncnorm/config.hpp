#pragma once

#if defined(__CUDACC__)
#define SYNCNORM_HOST_DEVICE __host__ __device__
#define SYNCNORM_DEVICE __device__
#define SYNCNORM_UNROLL _Pragma("unroll")
#define SYNCNORM_UNROLL_FOUR _Pragma("unroll 4")
#else
/// Marks a function that a CUDA compiler also compiles for the device.
#define SYNCNORM_HOST_DEVICE
/// Marks a function that a CUDA compiler compiles for the device alone.
#define SYNCNORM_DEVICE
/// Asks a CUDA compiler to unroll the loop that follows: in full, so that arrays may be registers, or by four, so that loads
/// may be in flight together.
#define SYNCNORM_UNROLL
#define SYNCNORM_UNROLL_FOUR
#endif

#if defined(__NVCC__)
#define SYNCNORM_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
/// Lets a template that is SYNCNORM_HOST_DEVICE call what its argument's type has for one of the two alone.
#define SYNCNORM_CALLS_EITHER
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SYNCNORM_HAS_CLUSTERS 1
#else
/// Whether what is compiled is for devices on which blocks may be a cluster.
#define SYNCNORM_HAS_CLUSTERS 0
#endif
