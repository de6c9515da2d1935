#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/kept_failure.hpp>
#include <syncnorm/comm/detail/require_rank.hpp>
#include <syncnorm/comm/detail/thread_state.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/function_ref.hpp>

namespace syncnorm {

/// An operation in flight among the threads of a group.
class thread_work {
public:
  thread_work(thread_work&& other) noexcept
      : state_{std::move(other.state_)}, slot_{std::exchange(other.slot_, nullptr)},
        failure_{std::move(other.failure_)}, rank_{other.rank_}, out_{other.out_} {}
  thread_work& operator=(thread_work&& other) noexcept {
    if (this == &other) return *this;
    drop();
    state_ = std::move(other.state_);
    slot_ = std::exchange(other.slot_, nullptr);
    failure_ = std::move(other.failure_);
    rank_ = other.rank_;
    out_ = other.out_;
    return *this;
  }
  ~thread_work() { drop(); }

  /// Whether the operation has completed. Throws what failed.
  bool test() {
    if (slot_ == nullptr) {
      failure_.tell();
      return true;
    }
    if (!state_->ended(*slot_, rank_)) return false;
    finish();
    return true;
  }

  /// Blocks until the operation has completed. Throws what failed.
  void wait() {
    if (slot_ == nullptr) return failure_.tell();
    state_->await(*slot_, rank_);
    finish();
  }

private:
  friend class thread_communicator;
  thread_work(std::shared_ptr<detail::thread_state> state, detail::thread_slot& slot, int rank, void* out)
      : state_{std::move(state)}, slot_{&slot}, rank_{rank}, out_{out} {}

  void finish() {
    failure_.keep([&] { state_->finish(*std::exchange(slot_, nullptr), rank_, out_); });
  }
  void drop() noexcept {
    try {
      wait();
    } catch (...) { // nobody is left to hear of it
    }
  }

  std::shared_ptr<detail::thread_state> state_;
  detail::thread_slot* slot_;
  detail::kept_failure failure_;
  int rank_;
  void* out_;
};

/// One rank's handle to a group of threads; copies are the same rank. Inputs are copied when an operation
/// starts, and every rank reduces them in rank order. Ranks that disagree on an operation all get a
/// mismatch_error from it, and may go on with the next. A late peer fails the group: every waiting rank gets
/// a timeout_error that names the late ones.
class thread_communicator {
public:
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return state_->size(); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    state_->run(rank_, describe<T>(detail::collective_kind::allgather, in.size()), std::as_bytes(in), out.data());
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    state_->run(rank_, describe<T>(detail::collective_kind::allreduce, in.size(), op), std::as_bytes(in), out.data());
  }
  template <wire_type T>
  [[nodiscard]] thread_work allgather_async(std::span<T const> in, std::span<T> out) const {
    return {state_, state_->start(rank_, describe<T>(detail::collective_kind::allgather, in.size()), std::as_bytes(in)),
            rank_, out.data()};
  }
  template <reducible_type T>
  [[nodiscard]] thread_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    return {state_,
            state_->start(rank_, describe<T>(detail::collective_kind::allreduce, in.size(), op), std::as_bytes(in)),
            rank_, out.data()};
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    detail::require_rank(root, size());
    state_->run(rank_, describe<T>(detail::collective_kind::broadcast, data.size(), reduce_op::sum, root),
                rank_ == root ? std::as_bytes(data) : std::span<std::byte const>{}, data.data());
  }
  template <wire_type T>
  void scatter(std::span<T const> in, std::span<T> out, int root) const {
    detail::require_rank(root, size());
    state_->run(rank_, describe<T>(detail::collective_kind::scatter, out.size(), reduce_op::sum, root),
                rank_ == root ? std::as_bytes(in) : std::span<std::byte const>{}, out.data(), in.size());
  }
  template <reducible_type T>
  void reduce(std::span<T const> in, std::span<T> out, int root, reduce_op op) const {
    detail::require_rank(root, size());
    state_->run(rank_, describe<T>(detail::collective_kind::reduce, in.size(), op, root), std::as_bytes(in), out.data(),
                out.size());
  }
  void barrier() const { state_->run(rank_, {.kind = detail::collective_kind::barrier}, {}, nullptr); }
  [[nodiscard]] double exchange_overhead() const noexcept { return 2e-6; }
  /// Every rank reads every other's contribution where it lies, to reduce it, too.
  [[nodiscard]] exchange_cost cost_of_exchange() const noexcept {
    exchange_cost cost;
    cost.latency = 1e-6;
    cost.reduction_scales = false;
    return cost;
  }

  /// The sub-communicator of the ranks that give the same `color`, any int, ordered by (key, rank).
  /// Collective.
  [[nodiscard]] thread_communicator split(int color, int key) const {
    std::array<std::int32_t, 2> const own{color, key};
    std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
    auto& slot = state_->start(rank_, {.kind = detail::collective_kind::split}, std::as_bytes(std::span{own}));
    auto const sequence = slot.sequence;
    state_->await(slot, rank_);
    state_->finish(slot, rank_, all.data());
    int members = 0, position = 0;
    for (int r = 0; r < size(); ++r) {
      auto const [other_color, other_key] = all[static_cast<std::size_t>(r)];
      if (other_color != color) continue;
      ++members;
      if (std::pair{other_key, r} < std::pair{key, rank_}) ++position;
    }
    return {state_->child(sequence, color, members), position};
  }

  /// Makes this communicator unusable on every rank, at once. Groups split from it go on.
  void abort() const { state_->abort("aborted by rank " + std::to_string(rank_)); }

private:
  friend class thread_group;
  thread_communicator(std::shared_ptr<detail::thread_state> state, int rank) : state_{std::move(state)}, rank_{rank} {}

  template <class T>
  static detail::signature describe(detail::collective_kind kind, std::size_t extent, reduce_op op = reduce_op::sum,
                                    int root = -1) {
    return {.extent = static_cast<std::int64_t>(extent),
            .root = root,
            .kind = kind,
            .type = detail::wire_id_of<T>,
            .op = op};
  }

  std::shared_ptr<detail::thread_state> state_;
  int rank_;
};

/// A group of `size` ranks that are threads of this process.
class thread_group {
public:
  /// Throws invalid_argument_error where size < 1 or timeout ≤ 0.
  explicit thread_group(int size, std::chrono::milliseconds timeout = default_timeout) {
    if (size < 1) throw invalid_argument_error{"thread_group: size " + std::to_string(size) + ", expected at least 1"};
    timeout = detail::checked_timeout("thread_group", timeout);
    bool const a_core_each = static_cast<unsigned>(size) <= std::thread::hardware_concurrency();
    state_ = detail::thread_state::make(size, timeout, a_core_each, std::make_shared<detail::thread_family>());
    state_->family().add(state_);
  }

  [[nodiscard]] int size() const noexcept { return state_->size(); }

  /// The handle of rank `rank`, for one thread to use at a time. It outlives the group. Throws invalid_argument_error where there is no
  /// such rank.
  [[nodiscard]] thread_communicator communicator(int rank) const {
    if (rank < 0 || rank >= size())
      throw invalid_argument_error{"thread_group: rank " + std::to_string(rank) + " of a group of " +
                                   std::to_string(size())};
    return {state_, rank};
  }

  /// Makes this group and every group split from it unusable, waking all ranks that wait, with `reason` in
  /// their errors.
  void abort(std::string const& reason = "aborted") const { state_->family().abort(reason); }

private:
  std::shared_ptr<detail::thread_state> state_;
};

namespace detail {

inline void run_ranks(int size, function_ref<void(thread_communicator)> f, std::chrono::milliseconds timeout) {
  thread_group const group{size, timeout};
  std::mutex mutex;
  std::exception_ptr cause;
  bool cause_is_echo = false;
  auto const record = [&](std::exception_ptr thrown, bool maybe_echo, std::string const& who) {
    {
      std::scoped_lock const held{mutex};
      if (cause == nullptr || (cause_is_echo && !maybe_echo)) {
        cause = std::move(thrown);
        cause_is_echo = maybe_echo;
      }
    }
    group.abort(who);
  };
  {
    std::vector<std::jthread> threads;
    try {
      threads.reserve(static_cast<std::size_t>(size));
      for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
          try {
            f(group.communicator(rank));
          } catch (communicator_error const& e) {
            record(std::current_exception(), true, "rank " + std::to_string(rank) + " threw: " + e.what());
          } catch (std::exception const& e) {
            record(std::current_exception(), false, "rank " + std::to_string(rank) + " threw: " + e.what());
          } catch (...) {
            record(std::current_exception(), false, "rank " + std::to_string(rank) + " threw");
          }
        });
    } catch (...) {
      record(std::current_exception(), false, "a rank could not be started");
    }
  }
  if (cause != nullptr) std::rethrow_exception(cause);
}

} // namespace detail

/// Calls `f(comm)` on `size` threads at once, each with its own rank's `thread_communicator`, and joins them.
/// Where a rank throws, the others' collectives fail at once, and the exception is rethrown here: the first
/// one that is not a communicator_error, which may be but an echo of it, else the first. Throws invalid_argument_error where `size`
/// or the timeout is not positive.
template <class F>
void run_ranks(int size, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  auto const run = [&](thread_communicator comm) { f(std::move(comm)); };
  detail::run_ranks(size, run, timeout);
}

} // namespace syncnorm
