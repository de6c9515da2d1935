# cmake -DWORK=<directory> -DBUILD=<build directory> -DSOURCE=<source directory> -DGENERATOR=<generator>
# -DCOMPILER=<C++ compiler> -P install.cmake: an empty WORK with the package in WORK/prefix; and in WORK/other without
# components and with its headers in another folder.
file(REMOVE_RECURSE "${WORK}")
set(without -DSYNCNORM_BUILD_TESTS=OFF -DSYNCNORM_BUILD_EXAMPLES=OFF -DSYNCNORM_BUILD_BENCH=OFF)
foreach(component IN ITEMS GLOO MPI TORCH CUDA NCCL)
  list(APPEND without -DSYNCNORM_WITH_${component}=OFF)
endforeach()
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/build" -G "${GENERATOR}"
  "-DCMAKE_CXX_COMPILER=${COMPILER}" ${without} -DCMAKE_INSTALL_INCLUDEDIR=headers
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/build" --prefix "${WORK}/other"
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix"
  COMMAND_ERROR_IS_FATAL ANY)
