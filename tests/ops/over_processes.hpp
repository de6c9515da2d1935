#pragma once

#include <functional>

#include <syncnorm/comm/any.hpp>

// For ranks that are processes, compiled once for all communicators. Each function runs on the first P ranks of `world`
// for P = 1, 2, 3, 4 and 7 up to its size, then gives some ranks bad input. Collective.
namespace test {

void check_batch_norm_over_processes(syncnorm::any_communicator const& world);
void check_power_norm_over_processes(syncnorm::any_communicator const& world);

/// The check of batch norm alone on `ranks` ranks. The oracle is asked here, once for all ranks forked later.
std::function<void(syncnorm::any_communicator const&)> batch_norm_check(int ranks);
/// Power norm in two layouts on all ranks of `comm`.
void check_power_norm_layouts(syncnorm::any_communicator const& comm);

} // namespace test
