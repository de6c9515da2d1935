#include <syncnorm/comm/any.hpp>

#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/thread_group.hpp>

#include "comm/bare.hpp"
#include "comm/contract.hpp"

using syncnorm::any_communicator;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using bare_communicator = contract::bare<thread_communicator>;

static_assert(syncnorm::blocking_communicator<any_communicator>);
static_assert(syncnorm::async_communicator<any_communicator>);
static_assert(syncnorm::splits<any_communicator> && syncnorm::aborts<any_communicator>);
static_assert(!std::is_convertible_v<int, any_communicator>);

TEST_CASE("any_communicator keeps the contract") {
  contract::check_contract(any_communicator{});
  for (int const ranks : {2, 3, 7})
    run_ranks(ranks, [](any_communicator const& comm) { contract::check_contract(comm); });
}

TEST_CASE("a communicator that only blocks gains asynchronous operations that have completed") {
  run_ranks(3, [](thread_communicator const& threads) {
    any_communicator const comm{bare_communicator{threads}};
    contract::check_derived(comm);
    contract::check_async(comm);
    contract::check_work_handles(comm);
    auto const in = contract::values<float>(comm.rank(), 4, 1);
    std::vector<float> out(12);
    auto work = syncnorm::allgather_async(comm, in, std::span{out});
    CHECK((out == contract::gathered<float>(3, 4, 1)));
    CHECK(work.test());
  });
}

TEST_CASE("what is polled is complete when it says so, and costs and overlaps what is wrapped does") {
  run_ranks(2, [](thread_communicator const& threads) {
    any_communicator const comm{threads};
    auto const in = contract::values<float>(comm.rank(), 4, 1);
    std::vector<float> out(8, -1);
    auto work = syncnorm::allgather_async(comm, in, std::span{out});
    while (!work.test()) std::this_thread::yield();
    CHECK((out == contract::gathered<float>(2, 4, 1)));
    CHECK(syncnorm::cost_of_exchange(comm) == syncnorm::cost_of_exchange(threads));
    CHECK(syncnorm::exchange_overhead(comm) == syncnorm::exchange_overhead(threads));
    CHECK(syncnorm::overlaps(comm) == syncnorm::overlaps(threads));
  });
}

TEST_CASE("what the wrapped communicator cannot do is a communicator_error") {
  run_ranks(2, [](thread_communicator const& threads) {
    any_communicator const able{threads}, unable{bare_communicator{threads}};
    CHECK(able.can_split());
    CHECK(able.can_abort());
    CHECK(!unable.can_split());
    CHECK(!unable.can_abort());
    CHECK_THROWS_WITH_AS((void)unable.split(0, 0), "any_communicator: backend cannot split",
                         syncnorm::communicator_error);
    CHECK_THROWS_WITH_AS(unable.abort(), "any_communicator: backend cannot abort", syncnorm::communicator_error);
    contract::check_allgather<float>(unable, 3, 1);
  });
}

TEST_CASE("abort and errors pass through") {
  syncnorm::thread_group const group{1};
  any_communicator const comm{group.communicator(0)};
  comm.abort();
  CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error);
  run_ranks(2, [](any_communicator const& each) {
    std::vector<float> data(each.rank() == 0 ? 1 : 2);
    auto work = syncnorm::allreduce_async(each, std::span<float const>{data}, std::span{data});
    CHECK_THROWS_AS(work.wait(), syncnorm::mismatch_error);
  });
}

TEST_CASE("target gives the wrapped communicator to who knows its type") {
  any_communicator const self;
  CHECK(self.target<syncnorm::self_communicator>() != nullptr);
  CHECK(self.target<thread_communicator>() == nullptr);
  syncnorm::thread_group const group{2};
  any_communicator const comm{group.communicator(1)};
  any_communicator const copy = comm;
  REQUIRE(copy.target<thread_communicator>() != nullptr);
  CHECK(copy.target<thread_communicator>() == comm.target<thread_communicator>());
  CHECK(copy.target<thread_communicator>()->rank() == 1);
}
