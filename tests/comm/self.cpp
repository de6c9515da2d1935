#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>

#include "comm/contract.hpp"

TEST_CASE("self_communicator keeps the contract") { contract::check_contract(syncnorm::self_communicator{}); }

static_assert(syncnorm::stream_communicator<syncnorm::self_communicator>);
static_assert(!syncnorm::stream_communicator<syncnorm::thread_communicator>);

TEST_CASE("self_communicator has nothing to do on a stream, and copies nothing there") {
  syncnorm::self_communicator const self;
  CUstream_st* const stream = nullptr;
  std::vector<double> values{1, 2, 3}, other(3);
  syncnorm::allgather(self, values, std::span{values}, stream);
  syncnorm::allreduce(self, values, std::span{values}, syncnorm::reduce_op::sum, stream);
  CHECK((values == std::vector<double>{1, 2, 3}));
  CHECK_THROWS_AS(syncnorm::allgather(self, values, std::span{other}, stream), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(syncnorm::allgather(self, values, std::span{other}.first(2), stream),
                  syncnorm::invalid_argument_error);
  syncnorm::allgather<double>(self, {}, {}, stream);
  syncnorm::check(self);
}
