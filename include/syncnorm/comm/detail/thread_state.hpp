#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/detail/signature.hpp>
#include <syncnorm/core/detail/cache_line.hpp>
#include <syncnorm/core/detail/line_allocator.hpp>
#include <syncnorm/core/detail/relax.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// What one rank brings to one operation. On cache lines of its own, since ranks write theirs at the same
/// time.
struct alignas(cache_line) thread_deposit {
  signature what;
  std::size_t root_extent = 0; // of the buffer that only the root of a scatter or reduce has
  std::vector<std::byte> data;
  std::chrono::steady_clock::time_point deadline;
  std::atomic<std::int64_t> arrived_at{-1}; // the sequence number of the last operation it was filled for
};

/// One operation. A rank writes its deposit, then counts itself in `arrived`; once all have, all read the
/// deposits, and count themselves in `consumed`; the last one recycles the slot.
struct alignas(cache_line) thread_slot {
  static constexpr std::size_t common_bytes = 4096; // which no operation has to allocate

  explicit thread_slot(int size) : deposits(static_cast<std::size_t>(size)) {
    for (auto& deposit : deposits) deposit.data.reserve(common_bytes);
  }

  std::atomic<int> arrived{0}, consumed{0};
  std::atomic<thread_slot*> next{nullptr};
  std::int64_t sequence = 0;
  std::vector<thread_deposit, line_allocator<thread_deposit>> deposits;
};

class thread_state;

/// A group and all that was split from it, at whatever depth, to abort them together.
class thread_family {
public:
  void add(std::shared_ptr<thread_state> const& group);
  void abort(std::string const& why);

private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<thread_state>> groups_;
  bool aborted_ = false;
  std::string why_;
};

/// The shared state of a group of threads. A rank's n-th operation meets the n-th of the others in one slot;
/// the slots are a list along which each rank moves. Inputs are copied in when an operation starts, so that
/// starting never waits, and each rank computes its own result from the copies when it finishes. Slots are
/// recycled, last one first: repeated extents allocate nothing, and stay in the cache.
class thread_state {
public:
  [[nodiscard]] static std::shared_ptr<thread_state> make(int size, std::chrono::milliseconds timeout, bool spin,
                                                          std::shared_ptr<thread_family> family) {
    return std::allocate_shared<thread_state>(line_allocator<thread_state>{}, size, timeout, spin, std::move(family));
  }
  thread_state(int size, std::chrono::milliseconds timeout, bool spin, std::shared_ptr<thread_family> family)
      : family_{std::move(family)}, size_{size}, timeout_{timeout}, spin_{spin},
        upcoming_(static_cast<std::size_t>(size)) {
    // Those that ranks need who are never more than one operation apart.
    constexpr std::size_t common = 3;
    for (std::size_t k = 0; k < common; ++k) slots_.push_back(std::make_unique<thread_slot>(size_));
    free_.reserve(common);
    for (auto const& slot : slots_) free_.push_back(slot.get());
    auto* const first = take();
    for (auto& each : upcoming_) each.slot = first;
  }

  thread_state(thread_state const&) = delete;
  thread_state& operator=(thread_state const&) = delete;

  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] thread_family& family() const noexcept { return *family_; }

  /// Deposits this rank's part of its next operation. Never waits for a peer.
  thread_slot& start(int rank, signature what, std::span<std::byte const> in, std::size_t root_extent = 0) {
    if (failed_.load(std::memory_order_acquire))
      throw communicator_error{"thread_group", "the communicator is unusable since it failed: " + failure_};
    auto& upcoming = upcoming_[static_cast<std::size_t>(rank)].slot;
    thread_slot& slot = *upcoming;
    auto& mine = slot.deposits[static_cast<std::size_t>(rank)];
    what.sequence = slot.sequence;
    mine.what = what;
    mine.root_extent = root_extent;
    mine.data.assign(in.begin(), in.end());
    mine.deadline = std::chrono::steady_clock::now() + timeout_;
    auto* const next = link(slot);

    mine.arrived_at.store(slot.sequence, std::memory_order_release);
    // Sequentially consistent with `sleepers_`: either the sleeper sees the last arrival, or this sees the
    // sleeper.
    bool const last = slot.arrived.fetch_add(1) + 1 == size_;
    if (last && sleepers_.load() > 0) {
      { std::scoped_lock const wait_until_asleep{mutex_}; }
      changed_.notify_all();
    }
    upcoming = next;
    return slot;
  }

  /// Whether the operation has ended, for better or worse.
  [[nodiscard]] bool ended(thread_slot& slot, int rank) {
    if (has_ended(slot)) return true;
    if (std::chrono::steady_clock::now() < slot.deposits[static_cast<std::size_t>(rank)].deadline) return false;
    std::scoped_lock const held{mutex_};
    time_out(slot);
    return has_ended(slot);
  }

  /// Waits until the operation has ended.
  void await(thread_slot& slot, int rank) {
    for (int i = 0; spin_ && i < spin_limit; ++i) {
      if (has_ended(slot)) return;
      relax();
    }
    std::unique_lock held{mutex_};
    auto const deadline = slot.deposits[static_cast<std::size_t>(rank)].deadline;
    ++sleepers_;
    while (!has_ended(slot))
      if (changed_.wait_until(held, deadline) == std::cv_status::timeout) time_out(slot);
    --sleepers_;
  }

  /// Writes the result of an operation that has ended and lets go of its slot; throws what failed.
  void finish(thread_slot& slot, int rank, void* out) {
    if (!is_complete(slot)) {
      if (timed_out_) throw timeout_error{"thread_group", failure_};
      throw communicator_error{"thread_group", failure_};
    }
    auto const mismatch = describe_mismatch(
        size_, [&](int r) -> signature const& { return slot.deposits[static_cast<std::size_t>(r)].what; });
    auto const misfit = mismatch.empty() ? describe_misfit(slot) : std::string{};
    if (mismatch.empty() && misfit.empty()) collect(slot, rank, out);
    release(slot);
    if (!mismatch.empty()) throw mismatch_error{"thread_group: " + mismatch};
    if (!misfit.empty()) throw invalid_argument_error{"thread_group: " + misfit};
  }

  /// Blocks until the operation has ended, and finishes it.
  void run(int rank, signature const& what, std::span<std::byte const> in, void* out, std::size_t root_extent = 0) {
    auto& slot = start(rank, what, in, root_extent);
    await(slot, rank);
    finish(slot, rank, out);
  }

  /// The state of the `size` ranks that gave `color` to the split which is operation `sequence`; the first to
  /// ask makes it.
  [[nodiscard]] std::shared_ptr<thread_state> child(std::int64_t sequence, int color, int size) {
    std::scoped_lock const held{mutex_};
    auto found =
        std::ranges::find_if(newborn_, [&](newborn const& n) { return n.sequence == sequence && n.color == color; });
    if (found == newborn_.end()) {
      auto made = make(size, timeout_, spin_, family_);
      family_->add(made);
      found = newborn_.insert(newborn_.end(), {sequence, color, size, std::move(made)});
    }
    auto result = found->state;
    if (--found->missing == 0) newborn_.erase(found);
    return result;
  }

  void abort(std::string const& why) {
    std::scoped_lock const held{mutex_};
    fail(why, false);
  }

private:
  struct alignas(cache_line) cursor {
    thread_slot* slot;
  };
  struct newborn {
    std::int64_t sequence;
    int color, missing;
    std::shared_ptr<thread_state> state;
  };

  /// About 100 µs: longer than waking a thread takes, since else a rank that once slept would send its peers
  /// to sleep in turn, and they it, for ever.
  static constexpr int spin_limit = 4000;

  [[nodiscard]] bool is_complete(thread_slot const& slot) const { return slot.arrived.load() == size_; }
  [[nodiscard]] bool has_ended(thread_slot const& slot) const { return is_complete(slot) || failed_.load(); }

  /// The slot after `slot`, for all ranks the same: the first rank to come brings it, while the others wait, lest each
  /// take one.
  thread_slot* link(thread_slot& slot) {
    if (auto* const linked = slot.next.load(std::memory_order_acquire)) return linked;
    std::scoped_lock const held{linking_};
    if (auto* const linked = slot.next.load(std::memory_order_relaxed)) return linked;
    auto* const next = take();
    next->sequence = slot.sequence + 1;
    slot.next.store(next, std::memory_order_release);
    return next;
  }

  thread_slot* take() {
    if (auto* const spare = spare_.exchange(nullptr)) return spare;
    std::scoped_lock const held{mutex_};
    if (free_.empty()) {
      free_.reserve(slots_.size() + 1);
      slots_.push_back(std::make_unique<thread_slot>(size_));
      return slots_.back().get();
    }
    auto* const slot = free_.back();
    free_.pop_back();
    return slot;
  }

  void give(thread_slot& slot) {
    thread_slot* none = nullptr;
    if (spare_.compare_exchange_strong(none, &slot)) return;
    std::scoped_lock const held{mutex_};
    free_.push_back(&slot);
  }

  void release(thread_slot& slot) {
    if (slot.consumed.fetch_add(1) + 1 < size_) return;
    slot.arrived.store(0, std::memory_order_relaxed);
    slot.consumed.store(0, std::memory_order_relaxed);
    slot.next.store(nullptr, std::memory_order_relaxed);
    give(slot);
  }

  /// What is wrong with the buffer of the root; empty where nothing is.
  [[nodiscard]] std::string describe_misfit(thread_slot const& slot) const {
    auto const& what = slot.deposits.front().what;
    if (what.kind != collective_kind::scatter && what.kind != collective_kind::reduce) return {};
    auto const found = slot.deposits[static_cast<std::size_t>(what.root)].root_extent;
    auto const expected = static_cast<std::size_t>(what.extent) *
                          (what.kind == collective_kind::scatter ? static_cast<std::size_t>(size_) : 1);
    if (found == expected) return {};
    return describe(what) + ": the buffer of rank " + std::to_string(what.root) + ", the root, has " +
           std::to_string(found) + " elements, expected " + std::to_string(expected);
  }

  void collect(thread_slot const& slot, int rank, void* out) const {
    auto const& what = slot.deposits.front().what;
    auto const copy = [&](std::byte const* from, std::size_t bytes, std::size_t offset) {
      if (bytes > 0) std::memcpy(static_cast<std::byte*>(out) + offset, from, bytes);
    };
    switch (what.kind) {
    case collective_kind::barrier:
    case collective_kind::duplication:
      return;
    case collective_kind::allgather:
    case collective_kind::split:
      for (std::size_t offset = 0; auto const& each : slot.deposits) {
        copy(each.data.data(), each.data.size(), offset);
        offset += each.data.size();
      }
      return;
    case collective_kind::broadcast:
    case collective_kind::scatter: {
      auto const& data = slot.deposits[static_cast<std::size_t>(what.root)].data;
      if (what.kind == collective_kind::broadcast) return copy(data.data(), rank == what.root ? 0 : data.size(), 0);
      auto const block = data.size() / static_cast<std::size_t>(size_);
      return copy(data.data() + block * static_cast<std::size_t>(rank), block, 0);
    }
    case collective_kind::reduce:
      if (rank != what.root) return;
      [[fallthrough]];
    case collective_kind::allreduce:
      visit_wire(what.type, [&]<class T>(T) {
        if constexpr (reducible_type<T>) reduce_deposits<T>(slot, static_cast<T*>(out), what);
      });
    }
  }

  template <reducible_type T>
  static void reduce_deposits(thread_slot const& slot, T* out, signature const& what) {
    constexpr std::size_t block = 4096; // so that the sums stay in the cache while the ranks are added to them
    auto const extent = static_cast<std::size_t>(what.extent);
    for (std::size_t first = 0; first < extent; first += block) {
      std::span const result{out + first, std::min(block, extent - first)};
      auto const part = [&](thread_deposit const& d) {
        return std::span{reinterpret_cast<T const*>(d.data.data()) + first, result.size()};
      };
      std::memcpy(result.data(), part(slot.deposits.front()).data(), result.size_bytes());
      for (auto const& each : std::span{slot.deposits}.subspan(1)) reduce_into<T>(result, part(each), what.op);
    }
  }

  void time_out(thread_slot& slot) {
    if (has_ended(slot)) return;
    auto const arrived = [&](thread_deposit const& d) { return d.arrived_at.load() == slot.sequence; };
    auto const late = list_ranks(size_, [&](int r) { return !arrived(slot.deposits[static_cast<std::size_t>(r)]); });
    if (late.empty()) return; // the last one is arriving right now
    auto const here = std::ranges::find_if(slot.deposits, arrived);
    fail(late + " did not arrive at collective " + std::to_string(slot.sequence) + ", " + describe(here->what) +
             ", within " + std::to_string(timeout_.count()) + " ms",
         true);
  }

  /// Ends every operation that not all ranks have joined, and all later ones. The mutex is held.
  void fail(std::string const& why, bool timed_out) {
    if (failed_) return;
    failure_ = why;
    timed_out_ = timed_out;
    failed_ = true;
    changed_.notify_all();
  }

  std::shared_ptr<thread_family> family_;
  int size_;
  std::chrono::milliseconds timeout_;
  bool spin_;
  std::vector<cursor, line_allocator<cursor>> upcoming_;

  alignas(cache_line) std::atomic<thread_slot*> spare_{nullptr}; // the slot that was used last
  alignas(cache_line) std::atomic<int> sleepers_{0};
  std::atomic<bool> failed_{false};
  // Written once, before failed_ is set; read after it was seen.
  bool timed_out_ = false;
  std::string failure_;

  std::mutex linking_; // taken before mutex_

  // Guarded by the mutex.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<thread_slot>> slots_;
  std::vector<thread_slot*> free_;
  std::vector<newborn> newborn_;
};

inline void thread_family::add(std::shared_ptr<thread_state> const& group) {
  std::scoped_lock const held{mutex_};
  std::erase_if(groups_, [](auto const& each) { return each.expired(); });
  groups_.push_back(group);
  if (aborted_) group->abort(why_);
}

inline void thread_family::abort(std::string const& why) {
  std::vector<std::shared_ptr<thread_state>> alive;
  {
    std::scoped_lock const held{mutex_};
    if (!std::exchange(aborted_, true)) why_ = why;
    for (auto const& each : groups_)
      if (auto group = each.lock()) alive.push_back(std::move(group));
  }
  for (auto const& group : alive) group->abort(why);
}

} // namespace syncnorm::detail
