# How a component's backend is found; used alike by the build and by the installed package.
#
# syncnorm_find_backend(<component>) defines the target syncnorm::backend_<component>, and in the caller's scope
# syncnorm_<component>_backend_found and syncnorm_<component>_backend_text, which says what was found or is missing.

set(syncnorm_backend_components gloo mpi torch)

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
  else()
    syncnorm_backend_missing("MPI was not found (Debian: libopenmpi-dev; elsewhere set MPI_HOME)")
  endif()
endmacro()

macro(syncnorm_backend_torch)
  # Its package reports every library that it comes across.
  set(CMAKE_MESSAGE_LOG_LEVEL WARNING)
  find_package(Torch CONFIG QUIET)
  if(TARGET torch)
    set(libraries ${TORCH_LIBRARIES})
    set(text "libtorch ${Torch_VERSION}")
  else()
    syncnorm_backend_missing("libtorch was not found (Debian: libtorch-dev; elsewhere set Torch_DIR)")
  endif()
endmacro()

# A function, so that what the backends' packages set stays in here.
function(syncnorm_find_backend component)
  set(found TRUE)
  set(libraries)
  set(include_directories)
  set(text)
  cmake_language(CALL syncnorm_backend_${component})
  if(found AND NOT TARGET syncnorm::backend_${component})
    add_library(syncnorm::backend_${component} INTERFACE IMPORTED)
    set_target_properties(syncnorm::backend_${component} PROPERTIES
      INTERFACE_LINK_LIBRARIES "${libraries}" INTERFACE_INCLUDE_DIRECTORIES "${include_directories}")
  endif()
  set(syncnorm_${component}_backend_found ${found} PARENT_SCOPE)
  set(syncnorm_${component}_backend_text "${text}" PARENT_SCOPE)
endfunction()
