#include <syncnorm/comm/thread_group.hpp>

#include <chrono>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "comm/contract.hpp"

using namespace std::chrono_literals;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::thread_group;

static_assert(syncnorm::blocking_communicator<thread_communicator>);
static_assert(syncnorm::async_communicator<thread_communicator>);
static_assert(syncnorm::splits<thread_communicator> && syncnorm::aborts<thread_communicator>);

namespace {

/// A timeout that a test waits for.
constexpr auto soon = 200ms;

/// Runs `f(comm)` on a thread per rank of `group`, and returns what each threw: "" or "<kind>: <message>".
template <class F>
std::vector<std::string> outcomes(thread_group const& group, F&& f) {
  std::vector<std::string> result(static_cast<std::size_t>(group.size()));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < group.size(); ++rank)
      threads.emplace_back([&, rank] {
        auto& mine = result[static_cast<std::size_t>(rank)];
        try {
          f(group.communicator(rank));
        } catch (syncnorm::timeout_error const& e) {
          mine = std::string{"timeout: "} + e.what();
        } catch (syncnorm::communicator_error const& e) {
          mine = std::string{"communicator: "} + e.what();
        } catch (syncnorm::mismatch_error const& e) {
          mine = std::string{"mismatch: "} + e.what();
        }
      });
  }
  return result;
}

template <class T>
void sum(thread_communicator const& comm, std::size_t extent, syncnorm::reduce_op op = syncnorm::reduce_op::sum) {
  std::vector<T> data(extent);
  syncnorm::allreduce(comm, std::span<T const>{data}, std::span{data}, op);
}

template <class T>
void gather(thread_communicator const& comm, std::size_t extent) {
  std::vector<T> out(extent * static_cast<std::size_t>(comm.size()));
  syncnorm::allgather(comm, std::vector<T>(extent), std::span{out});
}

/// Every rank must have been told `expected`, and the communicator must go on working.
template <class F>
void check_mismatch(int ranks, F&& f, std::string const& expected) {
  thread_group const group{ranks};
  for (auto const& outcome : outcomes(group, f)) CHECK(outcome == "mismatch: thread_group: " + expected);
  for (auto const& outcome : outcomes(group, [](auto const& comm) { contract::check_allgather<float>(comm, 3, 1); }))
    CHECK(outcome == "");
}

} // namespace

TEST_CASE("thread_communicator keeps the contract") {
  for (int const ranks : {1, 2, 3, 4, 7}) {
    CAPTURE(ranks);
    run_ranks(ranks, [](auto const& comm) { contract::check_contract(comm); });
  }
}

TEST_CASE("any int is a colour and a key") {
  constexpr int least = std::numeric_limits<int>::min(), most = std::numeric_limits<int>::max();
  run_ranks(3, [&](thread_communicator const& comm) {
    auto const part = syncnorm::split(comm, comm.rank() == 0 ? most : least, comm.rank() == 1 ? most : least);
    CHECK(part.size() == (comm.rank() == 0 ? 1 : 2));
    CHECK(part.rank() == (comm.rank() == 1 ? 1 : 0));
    contract::check_allgather<float>(part, 3, 1);
  });
}

TEST_CASE("sub-groups and handles outlive the group") {
  auto const comms = [] {
    thread_group const group{1};
    return std::vector{group.communicator(0), syncnorm::split(group.communicator(0), 3)};
  }();
  for (auto const& comm : comms) contract::check_allgather<float>(comm, 3, 1);
}

TEST_CASE("ranks that disagree are all told who asked for what, and may go on") {
  check_mismatch(
      3, [](auto const& comm) { gather<float>(comm, comm.rank() == 1 ? 5 : 4); },
      "ranks disagree on collective 0: ranks 0, 2: allgather of 4 float; rank 1: allgather of 5 float");
  check_mismatch(
      2, [](auto const& comm) { comm.rank() == 0 ? sum<double>(comm, 2) : sum<std::int64_t>(comm, 2); },
      "ranks disagree on collective 0: rank 0: allreduce (sum) of 2 double; rank 1: allreduce (sum) of 2 "
      "int64");
  check_mismatch(
      2,
      [](auto const& comm) {
        sum<float>(comm, 0, comm.rank() == 0 ? syncnorm::reduce_op::min : syncnorm::reduce_op::max);
      },
      "ranks disagree on collective 0: rank 0: allreduce (min) of 0 float; rank 1: allreduce (max) of 0 "
      "float");
  check_mismatch(
      4,
      [](auto const& comm) {
        if (comm.rank() == 0) return gather<std::byte>(comm, 1);
        if (comm.rank() == 1) return comm.barrier();
        if (comm.rank() == 2) return sum<std::int32_t>(comm, 1);
        (void)comm.split(0, 0);
      },
      "ranks disagree on collective 0: rank 0: allgather of 1 byte; rank 1: barrier; "
      "rank 2: allreduce (sum) of 1 int32; rank 3: split");
}

TEST_CASE("a root that is no rank is refused by the members, too") {
  run_ranks(2, [](thread_communicator const& comm) {
    std::vector<float> one(1), two(2);
    for (int const root : {-1, 2, 5}) {
      CHECK_THROWS_AS(comm.broadcast(std::span{one}, root), syncnorm::invalid_argument_error);
      CHECK_THROWS_AS(comm.scatter(std::span<float const>{two}, std::span{one}, root),
                      syncnorm::invalid_argument_error);
      CHECK_THROWS_AS(comm.reduce(std::span<float const>{one}, std::span{one}, root, syncnorm::reduce_op::sum),
                      syncnorm::invalid_argument_error);
    }
    comm.barrier();
  });
}

TEST_CASE("a mismatch of operations in flight is that operation's alone") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto const in = contract::values<float>(comm.rank(), 4, 1);
    std::vector<float> first(8), second(8), third(8);
    auto a = syncnorm::allgather_async(comm, in, std::span{first});
    auto b = syncnorm::allgather_async(comm, std::span{in}.first(comm.rank() == 0 ? 4 : 3),
                                       std::span{second}.first(comm.rank() == 0 ? 8 : 6));
    auto c = syncnorm::allgather_async(comm, in, std::span{third});
    c.wait();
    CHECK_THROWS_AS(b.wait(), syncnorm::mismatch_error);
    CHECK_THROWS_AS(b.wait(), syncnorm::mismatch_error); // whenever it is asked
    CHECK_THROWS_AS(b.test(), syncnorm::mismatch_error);
    a.wait();
    CHECK((first == contract::gathered<float>(2, 4, 1)));
    CHECK((third == first));
  });
}

TEST_CASE("every waiting rank is told which ranks did not arrive") {
  thread_group const group{4, soon};
  auto const told = outcomes(group, [](auto const& comm) {
    comm.barrier();
    if (comm.rank() % 2 == 0) sum<float>(comm, 7);
  });
  std::string const message = "ranks 1, 3 did not arrive at collective 1, allreduce (sum) of 7 float, within 200 ms";
  CHECK(told ==
        std::vector<std::string>{"timeout: thread_group: " + message, "", "timeout: thread_group: " + message, ""});

  // The late ones, and all later operations of whatever kind, fail at once.
  for (auto const& outcome : outcomes(group, [](auto const& comm) { sum<float>(comm, 7); }))
    CHECK(outcome == "communicator: thread_group: the communicator is unusable since it failed: " + message);
  auto const comm = group.communicator(0);
  std::vector<float> out(4);
  CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error);
  CHECK_THROWS_AS((void)comm.split(0, 0), syncnorm::communicator_error);
  CHECK_THROWS_AS((void)syncnorm::allgather_async(comm, std::span{out}.first(1), std::span{out}),
                  syncnorm::communicator_error);
}

TEST_CASE("polling alone finds the timeout, and an operation that all have joined survives it") {
  thread_group const group{2, soon};
  auto const told = outcomes(group, [](auto const& comm) {
    std::vector<std::int32_t> const in{comm.rank()};
    std::vector<std::int32_t> joined(2), missed(2);
    auto both = syncnorm::allgather_async(comm, in, std::span{joined});
    if (comm.rank() == 1) return both.wait();
    auto alone = syncnorm::allgather_async(comm, in, std::span{missed});
    try {
      while (!alone.test()) std::this_thread::yield();
    } catch (syncnorm::timeout_error const&) {
      both.wait();
      CHECK((joined == std::vector<std::int32_t>{0, 1}));
      throw;
    }
  });
  CHECK(told[0] == "timeout: thread_group: rank 1 did not arrive at collective 1, allgather of 1 int32, within 200 ms");
  CHECK(told[1] == "");
}

TEST_CASE("a rank that is late by less than the timeout is waited for") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto const until = std::chrono::steady_clock::now() + 5ms * comm.rank(); // longer than the other one spins
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
    contract::check_allgather<float>(comm, 5, 1);
  });
}

TEST_CASE("abort wakes all that wait, and leaves sub-groups alone") {
  thread_group const group{3};
  auto const told = outcomes(group, [](auto const& comm) {
    auto const part = syncnorm::split(comm, comm.rank() == 2 ? 1 : 0);
    if (comm.rank() == 2)
      comm.abort();
    else
      contract::check_allgather<float>(part, 3, 1);
    try {
      comm.barrier();
    } catch (...) {
      contract::check_allgather<double>(part, 3, 1);
      throw;
    }
  });
  for (auto const& outcome : told) {
    CHECK(outcome.starts_with("communicator: thread_group: "));
    CHECK(outcome.ends_with("aborted by rank 2"));
  }
}

TEST_CASE("the first reason to abort is the one that is told") {
  thread_group const group{2};
  group.abort("first");
  group.abort("second");
  CHECK_THROWS_WITH(group.communicator(0).barrier(), doctest::Contains("first"));
}

TEST_CASE("aborting the group reaches every group split from it") {
  thread_group const group{3};
  auto const told = outcomes(group, [&](auto const& comm) {
    auto const nested = syncnorm::split(syncnorm::split(comm, 0), comm.rank() == 2 ? 1 : 0);
    comm.barrier(); // now nobody holds the group in between
    if (comm.rank() == 1) return group.abort("enough");
    while (true) nested.barrier();
  });
  CHECK(told[0].ends_with("enough"));
  CHECK(told[1] == "");
  CHECK(told[2].ends_with("enough")); // alone in its sub-group, it waits for nobody
}

TEST_CASE("run_ranks rethrows the cause, not its echoes") {
  auto const cause = [](int ranks, auto const& f, std::chrono::milliseconds timeout = syncnorm::default_timeout) {
    try {
      run_ranks(ranks, f, timeout);
    } catch (std::exception const& e) {
      return std::string{e.what()};
    }
    return std::string{"nothing"};
  };
  CHECK(cause(3, [](auto const&) {}) == "nothing");
  CHECK(cause(3, [](auto const& comm) {
          comm.barrier();
          if (comm.rank() == 1) throw std::logic_error{"out of cheese"};
          comm.barrier();
        }) == "out of cheese");
  CHECK(cause(3, [](auto const& comm) { // while the others wait in a sub-group
          auto const part = syncnorm::split(comm, 0, -comm.rank());
          if (comm.rank() == 2) throw std::logic_error{"out of cheese"};
          part.barrier();
        }) == "out of cheese");
  CHECK(cause(2, [](auto const& comm) { // with an operation in flight that its peer never joins
          float value = 0;
          if (comm.rank() == 1) throw std::logic_error{"out of cheese"};
          auto const work = syncnorm::allreduce_async(comm, std::span<float const>{&value, 1}, std::span{&value, 1});
          comm.barrier();
        }) == "out of cheese");
  CHECK(cause(2, [](auto const& comm) { // the peer has heard of it before the cause is thrown
          if (comm.rank() == 0) return comm.barrier();
          comm.abort();
          throw std::logic_error{"out of cheese"};
        }) == "out of cheese");
  CHECK(cause(2, [](auto const& comm) {
          sum<float>(comm, comm.rank() == 0 ? 2 : 3);
        }).starts_with("thread_group: ranks disagree"));
  CHECK(cause(
            2,
            [](auto const& comm) {
              if (comm.rank() == 0) comm.barrier();
            },
            soon) == "thread_group: rank 1 did not arrive at collective 0, barrier, within 200 ms");
  CHECK_THROWS_AS(run_ranks(2,
                            [](auto const& comm) {
                              if (comm.rank() == 0) throw 5;
                              comm.barrier();
                            }),
                  int);
}

TEST_CASE("sizes, ranks and timeouts are checked") {
  CHECK_THROWS_AS(thread_group{0}, syncnorm::invalid_argument_error);
  CHECK_THROWS_AS((thread_group{2, 0ms}), syncnorm::invalid_argument_error);
  thread_group const group{2, std::chrono::milliseconds::max()};
  CHECK(group.size() == 2);
  run_ranks(
      2,
      [](auto const& comm) {
        if (comm.rank() == 1) std::this_thread::sleep_for(30ms);
        comm.barrier(); // whose deadline no clock can express
      },
      std::chrono::milliseconds::max());
  CHECK_THROWS_AS((void)group.communicator(2), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS((void)group.communicator(-1), syncnorm::invalid_argument_error);
}
