#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/detail/block_team.hpp>

#include <host/executors.hpp>

using namespace syncnorm;
using host::detail::block_team;
using host::detail::block_teams;

namespace {

constexpr std::int64_t block_count = 40;

/// What is to come of a share of a block, and how often it was begun.
struct team_case {
  std::int64_t shares;
  std::vector<std::int64_t> begun = std::vector<std::int64_t>(static_cast<std::size_t>(block_count * shares));
  std::vector<std::int64_t> totals = std::vector<std::int64_t>(static_cast<std::size_t>(block_count), -1);

  [[nodiscard]] static std::int64_t value(std::int64_t block, std::int64_t share) { return 1000 * block + share + 1; }

  /// Sums all shares of all blocks, each into memory that its team has for one block, and checks each block's total in every thread of
  /// its team. fault(block, share) before each.
  template <class E, class Fault>
  void run(E const& exec, Fault const& fault) {
    block_teams teams{exec, block_count, shares};
    std::vector<std::int64_t> values(static_cast<std::size_t>(teams.count() * shares));
    teams.for_each([&](block_team& team, std::int64_t of, std::int64_t begin, std::int64_t end, std::int64_t own) {
      auto* const of_team = values.data() + of * shares;
      for (std::int64_t block = begin; block < end; ++block) {
        auto const sum = [&](std::int64_t share) {
          fault(block, share);
          ++begun[static_cast<std::size_t>(block * shares + share)];
          of_team[share] = value(block, share);
          if (!team.add_share()) return;
          totals[static_cast<std::size_t>(block)] = std::accumulate(of_team, of_team + shares, std::int64_t{0});
          team.complete(block);
        };
        if (team.claim(block, own)) sum(own);
        if (!team.wait_for(block, sum)) return;
        std::int64_t expected = 0;
        for (std::int64_t share = 0; share < shares; ++share) expected += value(block, share);
        if (totals[static_cast<std::size_t>(block)] != expected) throw std::runtime_error{"a block is not complete"};
      }
    });
  }
};

/// Threads that come one after the other.
struct late_executor {
  [[nodiscard]] int concurrency() const { return 3; }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    std::vector<std::jthread> team;
    for (std::int64_t i = 0; i < n; ++i)
      team.emplace_back([&f, i] {
        std::this_thread::sleep_for(std::chrono::microseconds{100 * i});
        f(i);
      });
  }
};

template <class E>
void check_shares(E const& exec, std::int64_t shares) {
  CAPTURE(shares);
  team_case of{shares};
  of.run(exec, [](std::int64_t, std::int64_t) {});
  CHECK(std::ranges::count(of.begun, 1) == std::ssize(of.begun));
  CHECK(std::ranges::count(of.totals, -1) == 0);
}

} // namespace

TEST_CASE("a team takes every share of every block once, whatever threads there are, and whenever they come") {
  check_shares(host::serial_executor{}, 1);
  for (int round = 0; round < 20; ++round) {
    for (std::int64_t const shares : {1, 2, 4}) check_shares(test::shuffling_executor{4}, shares);
    check_shares(test::shuffling_executor{2}, 2);
    check_shares(late_executor{}, 3);
  }
  for (std::int64_t const shares : {1, 2, 4}) check_shares(test::lone_executor{4}, shares);
}

TEST_CASE("a thread of a team comes while the others wait for its share") {
  team_case of{2};
  of.run(test::shuffling_executor{2}, [](std::int64_t block, std::int64_t share) {
    if (block % 10 == share) std::this_thread::sleep_for(std::chrono::milliseconds{2});
  });
  CHECK(std::ranges::count(of.begun, 1) == std::ssize(of.begun));
}

TEST_CASE("what a thread of a team throws ends the others, and is thrown") {
  for (std::int64_t const share : {0, 1, 3}) {
    team_case of{4};
    auto const failing = [&](std::int64_t block, std::int64_t of_block) {
      if (block == 3 && of_block == share) throw std::runtime_error{"no memory"};
    };
    CHECK_THROWS_WITH_AS(of.run(test::shuffling_executor{4}, failing), "no memory", std::runtime_error);
    CHECK_THROWS_WITH_AS(of.run(test::lone_executor{4}, failing), "no memory", std::runtime_error);
    CHECK(of.totals[3] == -1);
    CHECK(of.totals[4] == -1);
  }
}
