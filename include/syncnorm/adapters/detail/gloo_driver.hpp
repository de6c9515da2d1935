#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/adapters/detail/gloo_slot.hpp>

namespace syncnorm::detail {

/// A thread that completes operations one after the other, from when the first is added.
class gloo_driver {
public:
  /// `drive(slot)` completes an operation, and says so in the slot.
  explicit gloo_driver(std::function<void(gloo_slot&)> drive) : drive_{std::move(drive)} {}
  gloo_driver(gloo_driver const&) = delete;
  gloo_driver& operator=(gloo_driver const&) = delete;
  ~gloo_driver() { stop(); }

  void add(gloo_slot& slot) {
    {
      std::lock_guard const lock{mutex_};
      if (!thread_.joinable()) {
        queue_.reserve(in_queue); // how many there are at a time is a matter of timing, and not of the first step alone
        thread_ = std::thread{[this] { run(); }};
      }
      queue_.push_back(&slot);
      slot.queued = true;
    }
    changed_.notify_all();
  }

  /// Returns when an operation that was added is complete.
  void wait(gloo_slot const& slot) {
    std::unique_lock lock{mutex_};
    done_.wait(lock, [&] { return slot.done.load(); });
  }

  /// Returns when all that was added is complete. Nothing may be added any more.
  void stop() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard const lock{mutex_};
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

private:
  static constexpr std::size_t in_queue = 64; // without an allocation

  void run() {
    std::unique_lock lock{mutex_};
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto& slot = *queue_.front();
      queue_.erase(queue_.begin());
      lock.unlock();
      drive_(slot);
      lock.lock();
      done_.notify_all();
    }
  }

  std::function<void(gloo_slot&)> drive_;
  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::vector<gloo_slot*> queue_; // a deque allocates now and then as things pass through it
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace syncnorm::detail
