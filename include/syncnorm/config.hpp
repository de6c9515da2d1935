#pragma once

#if __cplusplus < 202002L
#error "syncnorm needs C++20: compile with -std=c++20"
#endif
#if !defined(__cpp_exceptions)
#error "syncnorm needs exceptions: compile without -fno-exceptions"
#endif

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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define SYNCNORM_HAS_COPIES_TO_SHARED 0
#else
/// Whether devices for which is compiled copy to shared memory without registers.
#define SYNCNORM_HAS_COPIES_TO_SHARED 1
#endif

#if defined(__FLT16_MANT_DIG__) && (defined(__clang__) || __GNUC__ >= 13 || defined(__x86_64__))
#define SYNCNORM_HAS_FLOAT16 1
#else
/// Whether there is `_Float16`. g++ 12 describes it for other processors than x86, but has it there in C alone.
#define SYNCNORM_HAS_FLOAT16 0
#endif

#if !defined(SYNCNORM_HAS_SSE2)
#if defined(__x86_64__) && defined(__SSE2__)
#define SYNCNORM_HAS_SSE2 1
#else
/// Whether to use what all x86-64 have; 0 where it is set to that, too.
#define SYNCNORM_HAS_SSE2 0
#endif
#endif

#if defined(__AVX512F__)
#define SYNCNORM_VECTOR_BYTES 64
#define SYNCNORM_VECTORS vectors_of_64
#elif defined(__AVX__)
#define SYNCNORM_VECTOR_BYTES 32
#define SYNCNORM_VECTORS vectors_of_32
#else
/// Of the widest registers that the source is compiled for.
#define SYNCNORM_VECTOR_BYTES 16
/// The inline namespace of what is made of vectors: so sources of one program may be compiled for different processors.
#define SYNCNORM_VECTORS vectors_of_16
#endif
