#pragma once

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include <ucontext.h>

#if defined __SANITIZE_ADDRESS__
#define SIMT_ADDRESS_SANITIZER
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define SIMT_ADDRESS_SANITIZER
#endif
#endif
#ifdef SIMT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

/// Of the C library, whose <setjmp.h>, where it is fortified, puts one in its place that refuses to change stacks.
extern "C" [[noreturn]] void unchecked_longjmp(jmp_buf, int) __asm__("_longjmp");

/// A function with a stack of its own, which runs when it is resumed and may be left at any call of `leave`. Jumps between stacks,
/// since swapcontext asks the system for the signal mask each time.
class fiber {
public:
  static constexpr std::size_t stack_size = 128 * 1024;

  fiber() : stack_{new std::byte[stack_size]} {}
  fiber(fiber const&) = delete;
  fiber& operator=(fiber const&) = delete;

  /// `work` must not throw. What ran before and has not ended is forgotten.
  void start(std::function<void()> work) {
    work_ = std::move(work);
    if (done_ && entered_) { // its stack waits in `run`
      done_ = false;
      return;
    }
    done_ = entered_ = false;
    forget(stack_.get(), stack_size);
    getcontext(&entry_);
    entry_.uc_stack.ss_sp = stack_.get();
    entry_.uc_stack.ss_size = stack_size;
    auto const self = reinterpret_cast<std::size_t>(this);
    makecontext(&entry_, reinterpret_cast<void (*)()>(&fiber::run), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  }
  /// Runs until `leave` or to the end.
  [[gnu::noinline, gnu::no_sanitize_address]] void resume() {
    void* fake = nullptr;
    begin_switch(&fake, stack_.get(), stack_size);
    if (_setjmp(outside_) == 0) {
      if (entered_) unchecked_longjmp(inside_, 1);
      entered_ = true;
      setcontext(&entry_);
    }
    end_switch(fake, nullptr, nullptr);
  }
  [[gnu::noinline, gnu::no_sanitize_address]] void leave() {
    void* fake = nullptr;
    begin_switch(&fake, outer_, outer_size_);
    if (_setjmp(inside_) == 0) unchecked_longjmp(outside_, 1);
    end_switch(fake, &outer_, &outer_size_);
  }
  [[nodiscard]] bool done() const { return done_; }

private:
  static void run(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<fiber*>(static_cast<std::size_t>(high) << 32 | low);
    end_switch(nullptr, &self->outer_, &self->outer_size_);
    for (;;) {
      self->work_();
      self->done_ = true;
      self->leave();
    }
  }

  // AddressSanitizer has to know on which stack it is, and that what was left there is gone.
#ifdef SIMT_ADDRESS_SANITIZER
  static void begin_switch(void** fake, void const* to, std::size_t size) {
    __sanitizer_start_switch_fiber(fake, to, size);
  }
  static void end_switch(void* fake, void const** from, std::size_t* size) {
    __sanitizer_finish_switch_fiber(fake, from, size);
  }
  static void forget(void const* stack, std::size_t size) { __asan_unpoison_memory_region(stack, size); }
#else
  static void begin_switch(void**, void const*, std::size_t) {}
  static void end_switch(void*, void const**, std::size_t*) {}
  static void forget(void const*, std::size_t) {}
#endif

  std::unique_ptr<std::byte[]> stack_;
  std::function<void()> work_;
  ucontext_t entry_{};
  jmp_buf outside_{}, inside_{};
  void const* outer_ = nullptr; ///< the stack that resumes it
  std::size_t outer_size_ = 0;
  bool entered_ = false, done_ = true;
};

} // namespace simt
