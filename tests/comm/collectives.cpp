#include <syncnorm/comm/collectives.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/thread_group.hpp>

#include "comm/bare.hpp"
#include "comm/contract.hpp"
#include "comm/without_members.hpp"

#include <support/message_of.hpp>

namespace {

using communicator = contract::bare<syncnorm::thread_communicator>;
static_assert(syncnorm::blocking_communicator<communicator>);
static_assert(!syncnorm::async_communicator<communicator>);
static_assert(!syncnorm::splits<communicator> && !syncnorm::aborts<communicator>);

/// Cannot be asked for its rank where it is constant, as a handle is.
struct unasked {
  int rank() { return 0; }
  int size() { return 1; }
};
static_assert(!syncnorm::communicator<unasked> && !syncnorm::communicator<int>);

/// All that batch norm needs.
struct gathers_alone {
  syncnorm::thread_communicator const* comm;

  [[nodiscard]] int rank() const { return comm->rank(); }
  [[nodiscard]] int size() const { return comm->size(); }
  void allgather(std::span<std::byte const> in, std::span<std::byte> out) const { comm->allgather(in, out); }
};

} // namespace

TEST_CASE("a communicator with allgather and allreduce alone keeps the contract") {
  for (int const ranks : {1, 2, 5})
    syncnorm::run_ranks(ranks, [](auto const& comm) { contract::check_contract(communicator{comm}); });
}

TEST_CASE("a communicator without members keeps the contract by its traits") {
  syncnorm::run_ranks(3, [](auto const& comm) { contract::check_contract(contract::without_members{&comm}); });
}

TEST_CASE("a barrier takes no more than an allgather") {
  std::atomic<int> entered{0};
  syncnorm::run_ranks(3, [&](auto const& threads) {
    gathers_alone const comm{&threads};
    for (int i = 1; i <= 20; ++i) {
      ++entered;
      syncnorm::barrier(comm);
      CHECK(entered >= 3 * i);
    }
  });
}

// One test for what the communicator has itself and for what is made of its allgather and allreduce.
TEST_CASE_TEMPLATE("a wrong extent of the root is everybody's error", C, syncnorm::thread_communicator, communicator) {
  syncnorm::run_ranks(3, [](auto const& threads) {
    C const comm{threads};
    std::vector<std::int32_t> root_buffer(comm.rank() == 1 ? 7 : 0), block(2);
    auto const scattered = test_support::message_of<syncnorm::invalid_argument_error>(
        [&] { syncnorm::scatter(comm, root_buffer, std::span{block}, 1); });
    CHECK(scattered.find("the buffer of rank 1, the root, has 7 elements, expected 6") != std::string::npos);
    auto const reduced = test_support::message_of<syncnorm::invalid_argument_error>(
        [&] { syncnorm::reduce(comm, block, std::span{root_buffer}, 1); });
    CHECK(reduced.find("the buffer of rank 1, the root, has 7 elements, expected 2") != std::string::npos);
    contract::check_derived(comm);
  });
}

TEST_CASE_TEMPLATE("blocks that differ among the ranks are everybody's error", C, syncnorm::thread_communicator,
                   communicator) {
  syncnorm::run_ranks(3, [](auto const& threads) {
    C const comm{threads};
    std::vector<float> blocks(6), block(comm.rank() == 2 ? 3 : 2), out(block.size());
    CHECK_THROWS_AS(syncnorm::scatter(comm, blocks, std::span{block}, 0), syncnorm::mismatch_error);
    CHECK_THROWS_AS(syncnorm::reduce(comm, block, std::span{out}, 0), syncnorm::mismatch_error);
    contract::check_derived(comm);
  });
}

TEST_CASE_TEMPLATE("reduce writes to the root alone", C, syncnorm::thread_communicator, communicator) {
  syncnorm::run_ranks(2, [](auto const& threads) {
    C const comm{threads};
    std::vector<float> const in(17, 1.0F);
    std::vector<float> out(17, -5.0F);
    syncnorm::reduce(comm, in, std::span{out}, 0);
    CHECK(out[3] == (comm.rank() == 0 ? 2 : -5));
  });
}
