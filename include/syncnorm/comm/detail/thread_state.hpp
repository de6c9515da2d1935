#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/comm/detail/signature.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// Lets the other hardware thread of the core run while this one polls.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

enum class slot_state : std::uint8_t { pending, complete, mismatched, failed };

/// What one rank brought to one operation. Each on its own cache line, since ranks write them at the same
/// time.
struct alignas(64) thread_deposit {
  signature what;
  std::vector<std::byte> data;
  std::chrono::steady_clock::time_point deadline;
  bool arrived = false;
};

/// One operation in flight. `state` may be read at any time; the rest is guarded by the group's mutex, but
/// for the data, which a rank writes before it arrives and all read once the operation is complete.
struct thread_slot {
  std::atomic<slot_state> state{slot_state::pending};
  std::int64_t sequence = 0;
  std::vector<thread_deposit> deposits;
  int arrived = 0, consumed = 0;
  std::string mismatch;
};

/// The shared state of a group of threads. A rank's n-th operation meets the n-th of the others in one slot;
/// inputs are copied in when an operation starts, so that starting never waits, and each rank computes its
/// own result from the copies when it finishes. Slots are recycled: repeated extents allocate nothing.
class thread_state {
public:
  thread_state(int size, std::chrono::milliseconds timeout, bool spin)
      : size_{size}, timeout_{std::min(timeout, std::chrono::milliseconds{std::chrono::hours{24 * 365}})},
        spin_{spin}, next_(static_cast<std::size_t>(size)), ring_(16) {}

  thread_state(thread_state const&) = delete;
  thread_state& operator=(thread_state const&) = delete;

  [[nodiscard]] int size() const noexcept { return size_; }

  /// Deposits this rank's part of its next operation. Never waits for a peer.
  thread_slot& start(int rank, signature what, std::span<std::byte const> in) {
    auto const r = static_cast<std::size_t>(rank);
    auto held = hold();
    throw_if_failed();
    thread_slot& slot = find_slot(next_[r]);
    what.sequence = next_[r]++;
    held.unlock();

    auto& mine = slot.deposits[r];
    mine.what = what;
    mine.data.assign(in.begin(), in.end());
    mine.deadline = std::chrono::steady_clock::now() + timeout_;

    held = hold();
    mine.arrived = true;
    bool const wake = ++slot.arrived == size_ && complete(slot);
    held.unlock();
    if (wake) changed_.notify_all();
    return slot;
  }

  /// Whether the operation has ended, for better or worse.
  [[nodiscard]] bool ended(thread_slot& slot, int rank) {
    if (slot.state.load(std::memory_order_acquire) != slot_state::pending) return true;
    auto const deadline = slot.deposits[static_cast<std::size_t>(rank)].deadline;
    if (std::chrono::steady_clock::now() < deadline) return false;
    auto held = hold();
    time_out(slot);
    return true;
  }

  /// Waits until the operation has ended.
  void await(thread_slot& slot, int rank) {
    auto const pending = [&] { return slot.state.load(std::memory_order_acquire) == slot_state::pending; };
    for (int i = 0; spin_ && i < spin_limit; ++i) {
      if (!pending()) return;
      relax();
    }
    std::unique_lock held{mutex_};
    auto const deadline = slot.deposits[static_cast<std::size_t>(rank)].deadline;
    ++sleepers_;
    while (pending())
      if (changed_.wait_until(held, deadline) == std::cv_status::timeout) time_out(slot);
    --sleepers_;
  }

  /// Writes the result of an operation that has ended and lets go of its slot; throws what failed.
  void finish(thread_slot& slot, int rank, void* out) {
    switch (slot.state.load(std::memory_order_acquire)) {
    case slot_state::complete: {
      collect(slot, rank, out);
      release(slot);
      return;
    }
    case slot_state::mismatched: {
      auto const message = "thread_group: " + slot.mismatch;
      release(slot);
      throw mismatch_error{message};
    }
    default: {
      auto const held = hold();
      if (timed_out_) throw timeout_error{"thread_group", failure_};
      throw communicator_error{"thread_group", failure_};
    }
    }
  }

  /// Blocks until the operation has ended, and finishes it.
  void run(int rank, signature const& what, std::span<std::byte const> in, void* out) {
    auto& slot = start(rank, what, in);
    await(slot, rank);
    finish(slot, rank, out);
  }

  /// The state of the `size` ranks that gave `color` to the split which is operation `sequence`; the first to
  /// ask makes it.
  [[nodiscard]] std::shared_ptr<thread_state> child(std::int64_t sequence, int color, int size) {
    std::unique_lock held{mutex_};
    auto found = std::ranges::find_if(
        newborn_, [&](newborn const& n) { return n.sequence == sequence && n.color == color; });
    if (found == newborn_.end()) {
      auto made = std::make_shared<thread_state>(size, timeout_, spin_);
      if (tree_aborted_) made->fail(failure_, false);
      std::erase_if(children_, [](auto const& c) { return c.expired(); });
      children_.push_back(made);
      found = newborn_.insert(newborn_.end(), {sequence, color, size, std::move(made)});
    }
    auto result = found->state;
    if (--found->missing == 0) newborn_.erase(found);
    return result;
  }

  void abort(std::string const& why) {
    auto held = hold();
    fail(why, false);
  }

  /// Aborts this group and every group split from it.
  void abort_tree(std::string const& why) {
    std::vector<std::shared_ptr<thread_state>> children;
    {
      auto const held = hold();
      fail(why, false);
      tree_aborted_ = true;
      for (auto const& child : children_)
        if (auto alive = child.lock()) children.push_back(std::move(alive));
    }
    for (auto const& child : children) child->abort_tree(why);
  }

private:
  struct newborn {
    std::int64_t sequence;
    int color, missing;
    std::shared_ptr<thread_state> state;
  };

  /// Some tens of microseconds: longer than peers that arrive together are apart, shorter than a time slice.
  static constexpr int spin_limit = 1000;

  std::unique_lock<std::mutex> hold() {
    std::unique_lock held{mutex_, std::try_to_lock};
    for (int i = 0; spin_ && i < spin_limit && !held.owns_lock(); ++i) {
      relax();
      held.try_lock();
    }
    if (!held.owns_lock()) held.lock();
    return held;
  }

  void throw_if_failed() const {
    if (failed_)
      throw communicator_error{"thread_group", "the communicator is unusable since it failed: " + failure_};
  }

  thread_slot*& cell(std::int64_t sequence) {
    return ring_[static_cast<std::size_t>(sequence) & (ring_.size() - 1)];
  }

  thread_slot& find_slot(std::int64_t sequence) {
    while (cell(sequence) != nullptr && cell(sequence)->sequence != sequence) grow_ring();
    auto*& slot = cell(sequence);
    if (slot == nullptr) {
      if (free_.empty()) {
        free_.reserve(slots_.size() + 1);
        slots_.push_back(std::make_unique<thread_slot>());
        slots_.back()->deposits = std::vector<thread_deposit>(static_cast<std::size_t>(size_));
        free_.push_back(slots_.back().get());
      }
      slot = free_.back();
      free_.pop_back();
      slot->sequence = sequence;
    }
    return *slot;
  }

  void grow_ring() {
    std::vector<thread_slot*> const old = std::exchange(ring_, std::vector<thread_slot*>(ring_.size() * 2));
    for (auto* slot : old)
      if (slot != nullptr) cell(slot->sequence) = slot;
  }

  /// All have arrived. Returns whether someone must be woken.
  bool complete(thread_slot& slot) {
    if (slot.state.load(std::memory_order_relaxed) != slot_state::pending) return false;
    auto const& first = slot.deposits.front().what;
    bool const agreed = std::ranges::all_of(slot.deposits, [&](auto const& d) { return d.what == first; });
    if (!agreed)
      slot.mismatch = describe_mismatch(
          size_, [&](int r) -> signature const& { return slot.deposits[static_cast<std::size_t>(r)].what; });
    slot.state.store(agreed ? slot_state::complete : slot_state::mismatched, std::memory_order_release);
    return sleepers_ > 0;
  }

  void collect(thread_slot const& slot, int rank, void* out) const {
    auto const& what = slot.deposits[static_cast<std::size_t>(rank)].what;
    if (what.kind == collective::barrier || slot.deposits.front().data.empty()) return;
    if (what.kind == collective::allreduce) {
      visit_wire(what.type, [&]<class T>(T) {
        if constexpr (reducible_type<T>) {
          std::span const result{static_cast<T*>(out), static_cast<std::size_t>(what.extent)};
          auto const part = [&](thread_deposit const& d) {
            return std::span{reinterpret_cast<T const*>(d.data.data()), result.size()};
          };
          std::ranges::copy(part(slot.deposits.front()), result.begin());
          for (auto const& each : std::span{slot.deposits}.subspan(1))
            reduce_into<T>(result, part(each), what.op);
        }
      });
      return;
    }
    auto* to = static_cast<std::byte*>(out);
    for (auto const& each : slot.deposits) to = std::ranges::copy(each.data, to).out;
  }

  void release(thread_slot& slot) {
    auto const held = hold();
    if (++slot.consumed < size_) return;
    cell(slot.sequence) = nullptr;
    for (auto& each : slot.deposits) each.arrived = false;
    slot.arrived = slot.consumed = 0;
    slot.state.store(slot_state::pending, std::memory_order_relaxed);
    free_.push_back(&slot);
  }

  void time_out(thread_slot& slot) {
    if (slot.state.load(std::memory_order_relaxed) != slot_state::pending) return;
    auto const late = [&](int r) { return !slot.deposits[static_cast<std::size_t>(r)].arrived; };
    auto const here = std::ranges::find_if(slot.deposits, [](auto const& d) { return d.arrived; });
    fail(list_ranks(size_, late) + " did not arrive at collective " + std::to_string(slot.sequence) + ", " +
             describe(here->what) + ", within " + std::to_string(timeout_.count()) + " ms",
         true);
  }

  /// Ends every operation that is not complete yet, and all later ones. Operations that all ranks have joined
  /// succeed.
  void fail(std::string const& why, bool timed_out) {
    if (failed_) return;
    failed_ = true;
    failure_ = why;
    timed_out_ = timed_out;
    for (auto* slot : ring_)
      if (slot != nullptr && slot->state.load(std::memory_order_relaxed) == slot_state::pending)
        slot->state.store(slot_state::failed, std::memory_order_release);
    changed_.notify_all();
  }

  int size_;
  std::chrono::milliseconds timeout_;
  bool spin_;

  std::mutex mutex_;
  std::condition_variable changed_;
  int sleepers_ = 0;
  std::vector<std::int64_t> next_;
  std::vector<thread_slot*> ring_, free_;
  std::vector<std::unique_ptr<thread_slot>> slots_;
  bool failed_ = false, timed_out_ = false, tree_aborted_ = false;
  std::string failure_;
  std::vector<newborn> newborn_;
  std::vector<std::weak_ptr<thread_state>> children_;
};

} // namespace syncnorm::detail
