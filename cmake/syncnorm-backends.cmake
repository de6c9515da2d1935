# How a component's backend is found; used alike by the build and by the installed package.
#
# syncnorm_find_backend(<component>) defines the target syncnorm::backend_<component>, and in the caller's scope
# syncnorm_<component>_backend_found and syncnorm_<component>_backend_text, which says what was found or is missing.

set(syncnorm_backend_components gloo mpi torch cuda nccl)

macro(syncnorm_backend_missing text)
  set(found FALSE)
  set(text "${text}")
endmacro()

macro(syncnorm_backend_gloo)
  find_package(Gloo CONFIG QUIET)
  find_path(SYNCNORM_HIREDIS_INCLUDE_DIR hiredis.h PATH_SUFFIXES hiredis)
  find_library(SYNCNORM_HIREDIS_LIBRARY hiredis)
  mark_as_advanced(SYNCNORM_HIREDIS_INCLUDE_DIR SYNCNORM_HIREDIS_LIBRARY)
  if(NOT TARGET gloo)
    syncnorm_backend_missing("Gloo was not found (Debian: libgloo-dev; elsewhere set Gloo_DIR)")
  elseif(NOT SYNCNORM_HIREDIS_INCLUDE_DIR OR NOT SYNCNORM_HIREDIS_LIBRARY)
    # Gloo's redis_store.h includes <hiredis.h> without its folder.
    syncnorm_backend_missing("hiredis, which Gloo's Redis store needs, was not found (Debian: libhiredis-dev)")
  else()
    set(libraries gloo "${SYNCNORM_HIREDIS_LIBRARY}")
    set(include_directories "${SYNCNORM_HIREDIS_INCLUDE_DIR}")
    set(text "Gloo ${Gloo_VERSION}")
  endif()
endmacro()

macro(syncnorm_backend_mpi)
  # The C++ component, although the adapter calls the C interface alone: a source that includes <mpi.h> by itself may
  # refer to Open MPI's C++ bindings without knowing it.
  find_package(MPI QUIET COMPONENTS CXX)
  if(TARGET MPI::MPI_CXX)
    set(libraries MPI::MPI_CXX)
    set(text "MPI ${MPI_CXX_VERSION}")
  elseif(NOT CMAKE_CXX_COMPILER_LOADED)
    syncnorm_backend_missing("MPI is found for the languages of a project alone, of which CXX is none here")
  else()
    syncnorm_backend_missing("MPI was not found (Debian: libopenmpi-dev; elsewhere set MPI_HOME)")
  endif()
endmacro()

macro(syncnorm_backend_torch)
  # Its package reports every library that it comes across.
  set(CMAKE_MESSAGE_LOG_LEVEL WARNING)
  # It prefers the Caffe2 of another libtorch, in a default folder, to the one beside it.
  if(Torch_DIR AND NOT Caffe2_DIR AND EXISTS "${Torch_DIR}/../Caffe2/Caffe2Config.cmake")
    set(Caffe2_DIR "${Torch_DIR}/../Caffe2")
  endif()
  find_package(Torch CONFIG QUIET)
  if(TARGET torch)
    set(libraries ${TORCH_LIBRARIES})
    set(text "libtorch ${Torch_VERSION}")
  else()
    syncnorm_backend_missing("libtorch was not found (Debian: libtorch-dev; elsewhere set Torch_DIR)")
  endif()
endmacro()

macro(syncnorm_backend_cuda)
  # Finds nvcc in the PATH, and beneath CUDAToolkit_ROOT, the environment's CUDA_PATH and /usr/local/cuda.
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET CUDA::cudart)
    syncnorm_backend_missing("a CUDA toolkit was not found (NVIDIA's; elsewhere than in /usr/local/cuda set CUDAToolkit_ROOT or CUDA_PATH)")
  elseif(CUDAToolkit_VERSION VERSION_LESS 12.0)
    syncnorm_backend_missing("CUDA ${CUDAToolkit_VERSION} does not compile C++20, which 12.0 and later do")
  else()
    # What nvcc links has the runtime that its target's CUDA_RUNTIME_LIBRARY names.
    set(libraries "$<$<NOT:$<LINK_LANGUAGE:CUDA>>:CUDA::cudart>")
    set(include_directories "${CUDAToolkit_INCLUDE_DIRS}")
    set(text "CUDA ${CUDAToolkit_VERSION}")
  endif()
endmacro()

macro(syncnorm_backend_nccl)
  syncnorm_backend_cuda()
  if(found)
    find_path(SYNCNORM_NCCL_INCLUDE_DIR nccl.h HINTS ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
    find_library(SYNCNORM_NCCL_LIBRARY nccl
      HINTS ENV NCCL_ROOT "${CUDAToolkit_LIBRARY_ROOT}" ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
    mark_as_advanced(SYNCNORM_NCCL_INCLUDE_DIR SYNCNORM_NCCL_LIBRARY)
    set(version)
    if(SYNCNORM_NCCL_INCLUDE_DIR)
      file(STRINGS "${SYNCNORM_NCCL_INCLUDE_DIR}/nccl.h" version REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
      list(TRANSFORM version REPLACE "^[^0-9]*([0-9]+).*$" "\\1")
      list(JOIN version "." version)
    endif()
    if(NOT SYNCNORM_NCCL_INCLUDE_DIR OR NOT SYNCNORM_NCCL_LIBRARY)
      syncnorm_backend_missing("NCCL was not found (Debian: libnccl-dev; elsewhere set NCCL_ROOT in the environment)")
    elseif(version VERSION_LESS 2.18)
      syncnorm_backend_missing("NCCL ${version} is too old, expected 2.18 or later")
    else()
      list(APPEND libraries "${SYNCNORM_NCCL_LIBRARY}")
      list(PREPEND include_directories "${SYNCNORM_NCCL_INCLUDE_DIR}")
      list(REMOVE_DUPLICATES include_directories)
      string(PREPEND text "NCCL ${version}, ")
    endif()
  endif()
endmacro()

# A function, so that what the backends' packages set stays in here.
function(syncnorm_find_backend component)
  set(found TRUE)
  set(libraries)
  set(include_directories)
  set(text)
  # A project of which this is a part links what a backend's package has in folders of its own.
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)
  cmake_language(CALL syncnorm_backend_${component})
  if(found AND NOT TARGET syncnorm::backend_${component})
    add_library(syncnorm::backend_${component} INTERFACE IMPORTED)
    set_target_properties(syncnorm::backend_${component} PROPERTIES
      INTERFACE_LINK_LIBRARIES "${libraries}" INTERFACE_INCLUDE_DIRECTORIES "${include_directories}")
  endif()
  set(syncnorm_${component}_backend_found ${found} PARENT_SCOPE)
  set(syncnorm_${component}_backend_text "${text}" PARENT_SCOPE)
endfunction()
