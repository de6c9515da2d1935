# cmake -DPRESET=<name> -DJOBS=<n> -P run_configuration.cmake: configures, builds and tests that preset in build/<name>.

cmake_minimum_required(VERSION 3.25)
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH source)

function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${source}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run("${CMAKE_COMMAND}" --preset ${PRESET})
run("${CMAKE_COMMAND}" --build --preset ${PRESET} --parallel ${JOBS})
run("${CMAKE_CTEST_COMMAND}" --preset ${PRESET} --parallel ${JOBS} --no-tests=error)
