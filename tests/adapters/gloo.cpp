#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include "comm/contract.hpp"
#include "support/processes.hpp"

using namespace std::chrono_literals;

namespace {

std::shared_ptr<gloo::Context> connect(std::string const& directory, int rank, int size,
                                       std::chrono::milliseconds timeout = 60s) {
  auto const store = syncnorm::make_gloo_store("file:" + directory);
  return syncnorm::make_gloo_context(rank, size, *store, {.hostname = "127.0.0.1", .timeout = timeout});
}

} // namespace

TEST_CASE("gloo_communicator keeps the contract over processes") {
  for (int const size : {1, 2, 3, 4, 7}) {
    test_support::temporary_directory const directory;
    test_support::check_passed(test_support::run_processes(size, 60s, [&](int rank) {
      contract::check_contract(syncnorm::gloo_communicator{connect(directory.path(), rank, size), 60s});
    }));
  }
}
