#include <chrono>

#include <doctest/doctest.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include <ops/over_processes.hpp>
#include <support/processes.hpp>

namespace {

void over_processes(void (*check)(syncnorm::any_communicator const&)) {
  using namespace std::chrono_literals;
  constexpr int ranks = 7;
  test_support::temporary_directory const directory;
  test_support::check_passed(test_support::run_processes(ranks, 600s, [&](int rank) {
    auto const store = syncnorm::make_gloo_store("file:" + directory.path());
    auto const context = syncnorm::make_gloo_context(rank, ranks, *store, {.hostname = "127.0.0.1", .timeout = 600s});
    check(syncnorm::gloo_communicator{context, 600s});
  }));
}

} // namespace

TEST_CASE("batch norm over Gloo processes agrees with the oracle on the whole batch") {
  over_processes(test::check_batch_norm_over_processes);
}

TEST_CASE("power norm over Gloo processes is the reference on the whole batch") {
  over_processes(test::check_power_norm_over_processes);
}
