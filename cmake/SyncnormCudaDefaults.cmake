# What the project's own CUDA sources are compiled for and with, where nobody chose; SYNCNORM_DEFAULT_ARCHITECTURES says whether
# nobody chose the architectures. Included before the components are found, since libtorch's package enables the language, which
# takes the compiler's own defaults where there are no others.

set(SYNCNORM_DEFAULT_ARCHITECTURES FALSE)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(SYNCNORM_DEFAULT_ARCHITECTURES TRUE)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
