# cmake -DWORK=<directory> -DBUILD=<build directory> -P install.cmake: an empty WORK with the package in WORK/prefix.
file(REMOVE_RECURSE "${WORK}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix"
  COMMAND_ERROR_IS_FATAL ANY)
