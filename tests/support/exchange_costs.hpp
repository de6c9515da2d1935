#pragma once

#include <syncnorm/comm/exchange_cost.hpp>

namespace test {

/// Those of the adapters, of which include/syncnorm/README.md has a table.
inline constexpr syncnorm::exchange_cost mpi_cost{.latency = 2e-6, .bandwidth = 5e9},
    gloo_cost{.latency = 3e-5, .bandwidth = 1e9};

} // namespace test
