#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include "comm/contract.hpp"

TEST_CASE("self_communicator keeps the contract") { contract::check_contract(syncnorm::self_communicator{}); }
