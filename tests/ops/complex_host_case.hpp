#pragma once

#include <string>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include <ops/complex_case.hpp>
#include <ops/complex_second_order.hpp>

namespace test {

/// `run_complex_case` of the host's layer.
template <class T, syncnorm::communicator C>
std::vector<std::string> run_complex_case(complex_case const& of, C const& comm) {
  return run_complex_case<T>(of, comm, [&] {
    return syncnorm::complex_batch_norm<T, C>{comm, of.channels, {.norm = of.norm}, {}, of.gamma};
  });
}

/// `check_complex_double_backward` of the host's layer.
template <class T, syncnorm::communicator C>
std::vector<std::string> check_complex_double_backward(complex_second_order_case<T> const& problem, C const& comm) {
  auto const& of = problem.of;
  return check_complex_double_backward(problem, comm, [&] {
    return syncnorm::complex_batch_norm<T, C>{comm, of.channels, {.norm = of.norm}, {}, of.gamma};
  });
}

} // namespace test
