# What libtorch's package does where libtorch has CUDA, as far as it concerns a project that takes it.
enable_language(CUDA)
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(NOT TARGET torch)
  add_library(torch INTERFACE IMPORTED)
endif()
set(TORCH_LIBRARIES torch)
set(Torch_VERSION 2)
