#include <syncnorm/comm/thread_group.hpp>

#include <doctest/doctest.h>

#include "comm/contract.hpp"

TEST_CASE("thread_communicator keeps the contract") {
  for (int const ranks : {1, 2, 3, 4, 7}) {
    CAPTURE(ranks);
    syncnorm::run_ranks(ranks, [](auto const& comm) { contract::check_contract(comm); });
  }
}
