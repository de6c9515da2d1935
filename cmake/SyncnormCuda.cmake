# The language CUDA for the project's own tests, examples and benchmarks, where the component is; SYNCNORM_COMPILE_CUDA then
# says whether they have it. Included at the top, since a language is enabled for a directory and those below.

option(SYNCNORM_WITH_CUDA_LANGUAGE "Compile the CUDA sources of tests, examples and benchmarks where the toolkit is" ON)
option(SYNCNORM_FAST_DEVICE_EXAMPLES "Compile the device code of examples and consumers in a third less time, hardly optimized" OFF)
set(SYNCNORM_DEVICE_EXAMPLE_OPTIONS)
set(SYNCNORM_COMPILE_CUDA FALSE)
if(SYNCNORM_HAVE_CUDA AND SYNCNORM_WITH_CUDA_LANGUAGE)
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_NVCC_EXECUTABLE)
    if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
    endif()
    enable_language(CUDA)
    set(SYNCNORM_COMPILE_CUDA TRUE)
    if(SYNCNORM_FAST_DEVICE_EXAMPLES AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      set(SYNCNORM_DEVICE_EXAMPLE_OPTIONS --Ofast-compile=max)
    endif()
    list(JOIN CMAKE_CUDA_ARCHITECTURES ", sm_" architectures)
    string(APPEND syncnorm_summary "\n  CUDA sources of tests are compiled by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for sm_${architectures}")
  endif()
endif()

# Machine code of all default architectures from one intermediate code, which takes two thirds of the time of one for each; what
# somebody chose stays.
function(syncnorm_share_intermediate_code name)
  if(SYNCNORM_DEFAULT_ARCHITECTURES)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF)
    target_compile_options(${name} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[compute_80,sm_80,sm_90]>")
  endif()
endfunction()
