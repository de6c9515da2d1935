# cmake -DSCRIPT=<check_layers.cmake> -DWORK=<directory> -P layers_test.cmake: the layer check finds what it is for.

cmake_minimum_required(VERSION 3.25)

# The tree holds one header with the given text: the check must fail with a message that matches `expected`, or pass
# where that is empty.
function(expect path text expected)
  file(REMOVE_RECURSE "${WORK}")
  file(WRITE "${WORK}/syncnorm/${path}" "${text}")
  execute_process(COMMAND "${CMAKE_COMMAND}" "-DROOT=${WORK}" -P "${SCRIPT}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(expected STREQUAL "" AND status EQUAL 0)
    return()
  elseif(NOT expected STREQUAL "" AND NOT status EQUAL 0 AND output MATCHES "${expected}")
    return()
  endif()
  message(SEND_ERROR "${path}\n${text}\nexpected '${expected}', the check ended with ${status}:\n${output}")
endfunction()

set(once "#pragma once\n")
expect(core/a.hpp "${once}#include <vector>\n#include <syncnorm/core/b.hpp>\n#include <syncnorm/config.hpp>\n" "")
expect(adapters/a.hpp "${once}#include <gloo/context.h>\n#include <syncnorm/comm/b.hpp>\n" "")
expect(core/a.hpp "${once}#include <syncnorm/comm/b.hpp>\n" "core/a.hpp: includes <syncnorm/comm/b.hpp>, but core/")
expect(host/a.hpp "${once}#include <syncnorm/comm/b.hpp>\n" "host/a.hpp: includes <syncnorm/comm/b.hpp>")
expect(host/detail/a.hpp "${once}#include <syncnorm/ops/b.hpp>\n" "host/detail/a.hpp: includes <syncnorm/ops/b.hpp>")
expect(ops/a.hpp "${once}# include <syncnorm/adapters/mpi.hpp>\n" "includes <syncnorm/adapters/mpi.hpp>")
expect(comm/a.hpp "${once}  #  include <mpi.h>\n" "includes <mpi.h>, which comm/ may not")
expect(ops/a.hpp "${once}#include <torch/torch.h>\n" "includes <torch/torch.h>, which ops/ may not")
expect(host/a.hpp "${once}#include <cuda_runtime.h>\n" "includes <cuda_runtime.h>, which host/ may not")
expect(core/a.hpp "${once}#include <gloo/context.h>\n" "includes <gloo/context.h>")
expect(comm/a.hpp "${once}#include <nccl.h>\n" "includes <nccl.h>")
expect(syncnorm.hpp "${once}#include <syncnorm/adapters/gloo.hpp>\n" "includes <syncnorm/adapters/gloo.hpp>")
expect(core/a.hpp "${once}#include <syncnorm/core/b.cuh>\n" "which needs a CUDA compiler")
expect(core/a.hpp "${once}#include \"b.hpp\"\n" "expected <")
expect(core/a.hpp "#include <vector>\n" "not #pragma once")
expect(core/a.hpp "${once}#ifdef __CUDACC__\n#endif\n" "branches on a CUDA compiler")
expect(config.hpp "${once}#if defined(__CUDACC__)\n#endif\n" "")
expect(gpu/a.hpp "${once}" "gpu/ is not in the table")
file(REMOVE_RECURSE "${WORK}")
