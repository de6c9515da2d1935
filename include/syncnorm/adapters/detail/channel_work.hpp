#pragma once

#include <exception>
#include <memory>
#include <utility>

namespace syncnorm::detail {

/// The async_work of an operation that uses a slot of a channel.
template <class Channel, class Slot>
class channel_work {
public:
  channel_work() = default;
  channel_work(std::shared_ptr<Channel> channel, std::unique_ptr<Slot> slot)
      : channel_{std::move(channel)}, slot_{std::move(slot)} {}
  channel_work(channel_work&&) noexcept = default;
  channel_work& operator=(channel_work&& other) noexcept {
    if (this == &other) return *this;
    finish();
    channel_ = std::move(other.channel_);
    slot_ = std::move(other.slot_);
    error_ = std::move(other.error_);
    return *this;
  }
  ~channel_work() { finish(); }

  bool test() {
    return drive([&] { return channel_->test(*slot_); });
  }
  void wait() {
    drive([&] {
      channel_->wait(*slot_);
      return true;
    });
  }
  [[nodiscard]] Slot& slot() { return *slot_; }

private:
  template <class F>
  bool drive(F f) {
    if (error_) std::rethrow_exception(error_);
    if (!slot_) return true;
    try {
      if (!f()) return false;
    } catch (...) {
      error_ = std::current_exception();
    }
    channel_->close(std::move(slot_));
    if (error_) std::rethrow_exception(error_);
    return true;
  }
  void finish() noexcept {
    if (!slot_) return;
    try {
      wait();
    } catch (...) { // an operation that nobody asks about may fail
    }
  }

  std::shared_ptr<Channel> channel_;
  std::unique_ptr<Slot> slot_;
  std::exception_ptr error_;
};

} // namespace syncnorm::detail
