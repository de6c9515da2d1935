#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include <ucontext.h>

namespace simt {

/// A function with a stack of its own, which runs when it is resumed and may be left at any call of `leave`.
class fiber {
public:
  static constexpr std::size_t stack_size = 128 * 1024;

  fiber() : stack_{new std::byte[stack_size]} {}
  fiber(fiber const&) = delete;
  fiber& operator=(fiber const&) = delete;

  /// `work` must not throw.
  void start(std::function<void()> work) {
    work_ = std::move(work);
    done_ = false;
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = stack_size;
    inside_.uc_link = &outside_;
    auto const self = reinterpret_cast<std::size_t>(this);
    makecontext(&inside_, reinterpret_cast<void (*)()>(&fiber::run), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  }
  /// Runs until `leave` or to the end.
  void resume() { swapcontext(&outside_, &inside_); }
  void leave() { swapcontext(&inside_, &outside_); }
  [[nodiscard]] bool done() const { return done_; }

private:
  static void run(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<fiber*>(static_cast<std::size_t>(high) << 32 | low);
    self->work_();
    self->done_ = true;
  }

  std::unique_ptr<std::byte[]> stack_;
  std::function<void()> work_;
  ucontext_t inside_{}, outside_{};
  bool done_ = true;
};

} // namespace simt
