# The library's targets: syncnorm::syncnorm, and one target per component that this machine has the backend of.
#
# A new component is one more name and one more macro in syncnorm-backends.cmake, and one more row in layers.cmake.

include("${CMAKE_CURRENT_LIST_DIR}/syncnorm-backends.cmake")
set(SYNCNORM_COMPONENTS ${syncnorm_backend_components})

find_package(Threads REQUIRED)

add_library(syncnorm_syncnorm INTERFACE)
add_library(syncnorm::syncnorm ALIAS syncnorm_syncnorm)
set_target_properties(syncnorm_syncnorm PROPERTIES EXPORT_NAME syncnorm)
target_compile_features(syncnorm_syncnorm INTERFACE cxx_std_20)
target_include_directories(syncnorm_syncnorm INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
target_link_libraries(syncnorm_syncnorm INTERFACE Threads::Threads)

set(syncnorm_summary "syncnorm ${PROJECT_VERSION}:\n  syncnorm  found (C++20, threads)")
foreach(component IN LISTS SYNCNORM_COMPONENTS)
  string(TOUPPER ${component} upper)
  set(SYNCNORM_WITH_${upper} AUTO CACHE STRING "The component ${component}: AUTO, ON or OFF")
  set_property(CACHE SYNCNORM_WITH_${upper} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${SYNCNORM_WITH_${upper}}" wanted)
  if(NOT wanted MATCHES "^(AUTO|ON|OFF|YES|NO|TRUE|FALSE|1|0)$")
    message(FATAL_ERROR "SYNCNORM_WITH_${upper} is AUTO, ON or OFF, not ${SYNCNORM_WITH_${upper}}")
  endif()
  set(SYNCNORM_HAVE_${upper} FALSE)

  # Defined, and installed, whether or not its backend is here; usable, under its public name, only where it is.
  add_library(syncnorm_${component} INTERFACE)
  set_target_properties(syncnorm_${component} PROPERTIES EXPORT_NAME ${component})
  target_link_libraries(syncnorm_${component} INTERFACE syncnorm::syncnorm syncnorm::backend_${component})

  if(wanted STREQUAL "AUTO" OR wanted)
    syncnorm_find_backend(${component})
    if(syncnorm_${component}_backend_found)
      set(SYNCNORM_HAVE_${upper} TRUE)
      add_library(syncnorm::${component} ALIAS syncnorm_${component})
      set(line "found (${syncnorm_${component}_backend_text})")
    elseif(wanted STREQUAL "AUTO")
      set(line "left out: ${syncnorm_${component}_backend_text}")
    else()
      message(FATAL_ERROR "SYNCNORM_WITH_${upper} is ON, but ${syncnorm_${component}_backend_text}")
    endif()
  else()
    set(line "left out: SYNCNORM_WITH_${upper} is OFF")
  endif()
  string(LENGTH ${component} length)
  math(EXPR length "9 - ${length}")
  string(REPEAT " " ${length} space)
  string(APPEND syncnorm_summary "\n  ${component}${space} ${line}")
endforeach()

function(syncnorm_print_summary)
  message(STATUS "${syncnorm_summary}")
endfunction()
