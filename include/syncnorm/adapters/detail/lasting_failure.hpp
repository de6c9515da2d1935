#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace syncnorm::detail {

/// Whether a communicator has failed, for good, and why; any thread may ask.
class lasting_failure {
public:
  /// Before there is a reason.
  void happen() noexcept { happened_ = true; }
  /// Returns whether this is the first reason, which stays.
  bool happen(std::string const& reason) {
    std::lock_guard const lock{mutex_};
    if (!reason_.empty()) return false;
    reason_ = reason;
    happened_ = true;
    return true;
  }
  [[nodiscard]] bool has_happened() const noexcept { return happened_; }
  /// What whoever goes on is told.
  [[nodiscard]] std::string text() const {
    std::lock_guard const lock{mutex_};
    return "the communicator cannot be used any more: " + reason_;
  }

private:
  std::atomic<bool> happened_ = false;
  mutable std::mutex mutex_;
  std::string reason_;
};

} // namespace syncnorm::detail
