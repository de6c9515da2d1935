#pragma once

#include <string>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include <ops/complex_case.hpp>

namespace test {

/// `run_complex_case` of the host's layer.
template <class T, syncnorm::communicator C>
std::vector<std::string> run_complex_case(complex_case const& of, C const& comm) {
  return run_complex_case<T>(of, comm, [&] {
    return syncnorm::complex_batch_norm<T, C>{comm, of.channels, {.norm = of.norm}, {}, of.gamma};
  });
}

} // namespace test
