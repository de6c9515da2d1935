#pragma once

#include <syncnorm/comm/any.hpp>

// For ranks that are processes, compiled once for all communicators. Each function runs on the first P ranks of `world`
// for P = 1, 2, 3, 4 and 7 up to its size, then gives some ranks bad input. Collective.
namespace test {

void check_batch_norm_over_processes(syncnorm::any_communicator const& world);
void check_power_norm_over_processes(syncnorm::any_communicator const& world);

} // namespace test
