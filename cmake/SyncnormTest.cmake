# Functions for the project's own tests, examples and benchmarks. Nothing in here reaches a consumer.

option(SYNCNORM_WERROR "Treat warnings in the project's own code as errors" OFF)
set(SYNCNORM_PRIMITIVE_OPTIONS "" CACHE STRING "Compile options of the primitives that tests and examples call")
set(SYNCNORM_SANITIZE "" CACHE STRING "Sanitizers for tests and examples, such as address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

set(CMAKE_CXX_EXTENSIONS OFF)

add_library(syncnorm_development INTERFACE)
set(warnings -Wall -Wextra -Wconversion -Wshadow)
# CMake 3.25 does not know how nvcc is told of C++20.
set(cuda_options -std=c++20 -Xcompiler=-Wall,-Wextra,-Wshadow)
if(SYNCNORM_WERROR)
  list(APPEND warnings -Werror)
  list(APPEND cuda_options -Xcompiler=-Werror -Werror=all-warnings)
endif()
target_compile_options(syncnorm_development INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>"
  # A gigabyte before the first garbage collection compiles faster.
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1048576>")
# Asserts as calls rather than blocks that catch, which compile faster; what an expression throws fails its test case.
target_compile_definitions(syncnorm_development INTERFACE DOCTEST_CONFIG_SUPER_FAST_ASSERTS)
if(SYNCNORM_SANITIZE)
  target_compile_options(syncnorm_development INTERFACE
    -fsanitize=${SYNCNORM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(syncnorm_development INTERFACE -fsanitize=${SYNCNORM_SANITIZE})
  target_compile_definitions(syncnorm_development INTERFACE SYNCNORM_TEST_SANITIZED)
endif()

# What a process that the tests start finds in its environment: Open MPI may run as root, on fewer cores than ranks,
# and without the kernel's cross-memory attach, which containers forbid. The variables mean nothing to other programs.
set(SYNCNORM_TEST_ENVIRONMENT
  OMP_NUM_THREADS=1
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
  OMPI_MCA_btl_vader_single_copy_mechanism=none
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
  UBSAN_OPTIONS=print_stacktrace=1
  TSAN_OPTIONS=second_deadlock_stack=1)

# syncnorm_register_test(<name> COMMAND <command>... [PROCESSORS n] [TIMEOUT seconds] [LABELS label...]
#   [ENVIRONMENT VAR=value...] [RUN_SERIAL]) is add_test with the properties that every test has. An exit status of 77
# means that the machine lacks what the test needs.
function(syncnorm_register_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "RUN_SERIAL" "PROCESSORS;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(SYNCNORM_SANITIZE)
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS} RUN_SERIAL ${arg_RUN_SERIAL} SKIP_RETURN_CODE 77
    LABELS "${arg_LABELS}" ENVIRONMENT "${SYNCNORM_TEST_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()

# syncnorm_add_compiled(<name> HEADERS a.hpp... INSTANCES "..."... LIBRARIES ...): a library of instances, each compiled in a source
# of its own, after the headers.
function(syncnorm_add_compiled name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS;INSTANCES;LIBRARIES")
  list(TRANSFORM arg_HEADERS REPLACE "(.+)" "#include <\\1>" OUTPUT_VARIABLE includes)
  list(JOIN includes "\n" includes)
  set(sources)
  foreach(instance IN LISTS arg_INSTANCES)
    list(LENGTH sources i)
    set(source "${PROJECT_BINARY_DIR}/compiled/${name}_${i}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "${includes}\n${instance}\n" @ONLY)
    list(APPEND sources "${source}")
  endforeach()
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(${name} PUBLIC ${arg_LIBRARIES} PRIVATE syncnorm_development)
endfunction()

# The primitives of the CPU, and the passes of the libtorch module, which call them.
set(primitives "SYNCNORM_PRIMITIVES(, float)" "SYNCNORM_PRIMITIVES(, double)" "SYNCNORM_PRIMITIVES(, syncnorm::bfloat16)")
if(NOT SYNCNORM_SANITIZE MATCHES "thread") # to which both 16-bit types are the same
  list(APPEND primitives "SYNCNORM_PRIMITIVES(, syncnorm::float16)")
endif()
syncnorm_add_compiled(syncnorm_compiled_primitives HEADERS syncnorm/host/compiled_primitives.hpp LIBRARIES syncnorm::syncnorm
  INSTANCES ${primitives})
target_compile_options(syncnorm_compiled_primitives PRIVATE ${SYNCNORM_PRIMITIVE_OPTIONS})
if(TARGET syncnorm::torch)
  syncnorm_add_compiled(syncnorm_compiled_passes HEADERS syncnorm/torch/compiled_passes.hpp
    LIBRARIES syncnorm_compiled_primitives syncnorm::torch
    INSTANCES "SYNCNORM_TORCH_PASSES(, float, float)
SYNCNORM_TORCH_PASSES(, double, double)
SYNCNORM_TORCH_PASSES(, float16, float16)
SYNCNORM_TORCH_PASSES(, float16, float)
SYNCNORM_TORCH_PASSES(, bfloat16, bfloat16)
SYNCNORM_TORCH_PASSES(, bfloat16, float)")
  target_precompile_headers(syncnorm_compiled_passes PRIVATE <torch/torch.h>)
endif()

# syncnorm_reuse_torch_headers(<name>...): the targets' sources, which include libtorch, find its headers parsed.
function(syncnorm_reuse_torch_headers)
  foreach(name IN LISTS ARGN)
    target_precompile_headers(${name} REUSE_FROM syncnorm_compiled_passes)
  endforeach()
endfunction()

# syncnorm_add_test(<name> SOURCES a.cpp... [LIBRARIES syncnorm::mpi...] [MPI_RANKS n...] [ARGUMENTS ...]
#   [LABELS ...] [TIMEOUT seconds] [PROCESSORS n] [RUN_SERIAL] [ENVIRONMENT VAR=value...])
#
# Builds one executable, with doctest, and a main where the sources have none, and registers it: under mpiexec with MPI_RANKS,
# once for each of them where there are several, as <name>.<ranks>.
function(syncnorm_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "RUN_SERIAL" "PROCESSORS;TIMEOUT"
    "SOURCES;LIBRARIES;MPI_RANKS;ARGUMENTS;LABELS;ENVIRONMENT")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "syncnorm_add_test(${name}): sources '${arg_SOURCES}', unknown '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${name} PRIVATE syncnorm::syncnorm ${arg_LIBRARIES} syncnorm_test_main syncnorm_development)
  # Clang parses the standard library's headers, a second for most sources, once for all. GCC's options differ by test.
  if(SYNCNORM_SANITIZE AND NOT "OpenMP::OpenMP_CXX" IN_LIST arg_LIBRARIES)
    target_precompile_headers(${name} REUSE_FROM syncnorm_test_main)
  endif()

  set(options)
  if("syncnorm::mpi" IN_LIST arg_LIBRARIES)
    # Open MPI keeps memory until the end in plugins that it has unloaded by then, which no suppression can name.
    list(APPEND arg_ENVIRONMENT ASAN_OPTIONS=detect_leaks=0)
  endif()
  foreach(key IN ITEMS TIMEOUT LABELS ENVIRONMENT)
    if(arg_${key})
      list(APPEND options ${key} ${arg_${key}})
    endif()
  endforeach()
  if(arg_RUN_SERIAL)
    list(APPEND options RUN_SERIAL)
  endif()
  if(NOT arg_MPI_RANKS)
    syncnorm_register_test(${name} COMMAND ${name} ${arg_ARGUMENTS} PROCESSORS ${arg_PROCESSORS} ${options})
    return()
  endif()
  list(LENGTH arg_MPI_RANKS launches)
  foreach(ranks IN LISTS arg_MPI_RANKS)
    set(launch ${name})
    if(launches GREATER 1)
      set(launch ${name}.${ranks})
    endif()
    syncnorm_register_test(${launch} PROCESSORS ${ranks} ${options}
      COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS}
        $<TARGET_FILE:${name}> ${MPIEXEC_POSTFLAGS} ${arg_ARGUMENTS})
  endforeach()
endfunction()

# syncnorm_add_selection(<name> OF <test> ONLY <filter> [LABELS ...]): the test cases of a test's executable that doctest's filter
# selects, as a test of its own.
function(syncnorm_add_selection name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "OF;ONLY" "LABELS")
  syncnorm_register_test(${name} COMMAND ${arg_OF} "${arg_ONLY}" LABELS ${arg_LABELS})
  set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "test cases: +0 ") # none was found
endfunction()

# syncnorm_add_example(<name> SOURCES a.cpp... [LIBRARIES ...] [ARGUMENTS ...] [TIMEOUT seconds] [NO_TEST])
# builds an example, and runs it as the test examples.<name> where tests are built.
function(syncnorm_add_example name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NO_TEST" "TIMEOUT" "SOURCES;LIBRARIES;ARGUMENTS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "syncnorm_add_example(${name}): sources '${arg_SOURCES}', unknown '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE syncnorm::syncnorm ${arg_LIBRARIES} syncnorm_development)
  if(SYNCNORM_BUILD_TESTS AND NOT arg_NO_TEST)
    syncnorm_register_test(examples.${name} COMMAND ${name} ${arg_ARGUMENTS}
      TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()
