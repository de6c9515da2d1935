#include <doctest/doctest.h>

#include <chrono>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include <ops/power_norm_processes.hpp>
#include <support/processes.hpp>

TEST_CASE("power norm over Gloo processes is the reference on the whole batch") {
  using namespace std::chrono_literals;
  constexpr int ranks = 7;
  test_support::temporary_directory const directory;
  test_support::check_passed(test_support::run_processes(ranks, 600s, [&](int rank) {
    auto const store = syncnorm::make_gloo_store("file:" + directory.path());
    auto const context = syncnorm::make_gloo_context(rank, ranks, *store, {.hostname = "127.0.0.1", .timeout = 600s});
    test::check_power_norm_over_processes(syncnorm::gloo_communicator{context, 600s});
  }));
}
