#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include <syncnorm/core/detail/cache_line.hpp>
#include <syncnorm/core/detail/relax.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Threads that take blocks one after the other, a share of each, which a thread claims, and then sums. A block is complete when all its
/// shares are summed; then the next one begins. Nobody waits for a thread that has not come: who is done with a share takes those that
/// nobody claims. So a team of any threads ends, of one alone, too.
class block_team {
public:
  static constexpr std::int64_t most_shares = groups::most;

  /// What the threads of a team have in common.
  struct alignas(syncnorm::detail::cache_line) progress {
    /// Of each share, the block of which nobody has it yet.
    std::array<std::int64_t, static_cast<std::size_t>(most_shares)> unclaimed;
    std::int64_t summed, complete, failed;
  };

  block_team(progress& of, std::int64_t shares) : of_{of}, shares_{shares} {}

  /// Whether the calling thread has the share of this block, the one after those that are complete, from now on.
  [[nodiscard]] bool claim(std::int64_t block, std::int64_t share) {
    std::int64_t expected = block;
    return std::atomic_ref{of_.unclaimed[static_cast<std::size_t>(share)]}.compare_exchange_strong(expected, block + 1);
  }

  /// Notes that a share has been summed; whether all of its block have been. Then the block is to be completed.
  [[nodiscard]] bool add_share() {
    std::atomic_ref summed{of_.summed};
    if (summed.fetch_add(1) + 1 < shares_) return false;
    summed.store(0);
    return true;
  }
  [[nodiscard]] bool is_complete(std::int64_t block) const { return std::atomic_ref{of_.complete}.load() > block; }
  void complete(std::int64_t block) { std::atomic_ref{of_.complete}.store(block + 1); }

  /// Waits until the block is complete, and calls sum(share) for shares of it that it claims; false if a thread has failed instead.
  template <class Sum>
  [[nodiscard]] bool wait_for(std::int64_t block, Sum const& sum) {
    std::int64_t const patience = patience_;
    patience_ = most_polls;
    for (std::int64_t polls = 0; !is_complete(block); ++polls) {
      if (std::atomic_ref{of_.failed}.load() != 0) return false;
      if (polls < patience) {
        syncnorm::detail::relax();
        continue;
      }
      bool claimed = false;
      for (std::int64_t share = 0; share < shares_; ++share) {
        if (!claim(block, share)) continue;
        claimed = true;
        sum(share);
      }
      if (claimed)
        patience_ = 0; // its thread may not come to the next block either
      else
        std::this_thread::yield();
    }
    return true;
  }

  /// Has the others give up.
  void fail() { std::atomic_ref{of_.failed}.store(1); }

private:
  static constexpr std::int64_t most_polls = 1 << 10; ///< some tens of microseconds

  progress& of_;
  std::int64_t shares_, patience_ = most_polls;
};

/// Runs of consecutive blocks, each of a team of so many threads; two to a team, or one of all where there is one team.
class block_teams {
public:
  block_teams(executor_ref exec, std::int64_t blocks, std::int64_t shares)
      : exec_{exec}, blocks_{blocks}, shares_{shares}, count_{runs(exec.concurrency())}, progress_{count_} {}

  [[nodiscard]] std::int64_t count() const { return count_; }

  /// Calls f(team, its run, first block, end, share) for each share of each run, the shares of a run in a row, and at the same time if
  /// the executor does.
  template <class F>
  void for_each(F const& f) {
    for (std::int64_t run = 0; run < count_; ++run) {
      auto& of = progress_.data()[run] = {};
      std::ranges::fill(of.unclaimed, run * blocks_ / count_);
      of.complete = run * blocks_ / count_;
    }
    std::atomic<std::int64_t> begun = 0;
    exec_.for_each(count_ * shares_, [&](std::int64_t) {
      std::int64_t const i = begun.fetch_add(1), run = i / shares_;
      block_team team{progress_.data()[run], shares_};
      try {
        f(team, run, run * blocks_ / count_, (run + 1) * blocks_ / count_, i % shares_);
      } catch (...) {
        team.fail();
        throw;
      }
    });
  }

private:
  [[nodiscard]] std::int64_t runs(std::int64_t threads) const {
    return threads == shares_ ? 1 : std::min(blocks_, 2 * threads / shares_);
  }

  executor_ref exec_;
  std::int64_t blocks_, shares_, count_;
  scratch_lease<block_team::progress> progress_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
