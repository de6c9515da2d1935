#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <exception>
#include <type_traits>

#include <syncnorm/core/function_ref.hpp>

namespace syncnorm::host {

/// Runs f(0) … f(n − 1) on the calling thread.
struct serial_executor {
  [[nodiscard]] int concurrency() const noexcept { return 1; }

  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

/// Runs pieces of work: `for_each(n, f)` calls f(i) once for each i in [0, n), in any order, possibly at the same time, and
/// returns when all have returned; `concurrency()` is how many can run at the same time, less than 1 being taken for 1. A
/// call may wait for what another one does that has begun, and for no other. The primitives give the same bits whatever the
/// executor. Where `concurrency()` throws, that is as if the first `for_each` did. Calls nothing that throws.
template <class E>
concept executor = requires(E const& exec, void (&f)(std::int64_t)) {
  { exec.concurrency() } -> std::same_as<int>;
  exec.for_each(std::int64_t{}, f);
};

/// Any executor, by reference, as the primitives take it, which so are compiled once for all executors. An executor without
/// state need not outlive it.
class executor_ref {
public:
  executor_ref(serial_executor) noexcept {}
  template <executor E>
  requires(!std::same_as<E, executor_ref>) executor_ref(E const& exec) : executor_{&exec}, for_each_{&for_each_by<E>} {
    try {
      concurrency_ = std::max(1, exec.concurrency());
    } catch (...) {
      for_each_ = &for_each_after_all<E>;
    }
  }

  [[nodiscard]] int concurrency() const noexcept { return concurrency_; }

  /// Throws what a call of f throws, such as for want of memory, when all have returned.
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for_each_ == nullptr ? serial_executor{}.for_each(n, f) : run(n, f);
  }

private:
  using call = function_ref<void(std::int64_t)>;

  void run(std::int64_t n, call f) const {
    std::atomic<bool> failed = false;
    std::exception_ptr failure;
    auto const caught = [&](std::int64_t i) {
      try {
        f(i);
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
    };
    for_each_(executor_, n, caught);
    if (failure) std::rethrow_exception(failure);
  }

  template <class E, class F>
  static void with(void const* exec, F const& f) {
    if constexpr (std::is_empty_v<E> && std::default_initializable<E>)
      f(E{});
    else
      f(*static_cast<E const*>(exec));
  }
  template <class E>
  static void for_each_by(void const* exec, std::int64_t n, call f) {
    with<E>(exec, [&](E const& by) { by.for_each(n, f); });
  }
  /// Where its concurrency was not to be had.
  template <class E>
  static void for_each_after_all(void const* exec, std::int64_t n, call f) {
    with<E>(exec, [&](E const& by) {
      static_cast<void>(by.concurrency());
      by.for_each(n, f);
    });
  }

  void const* executor_ = nullptr;
  void (*for_each_)(void const*, std::int64_t, call) = nullptr;
  int concurrency_ = 1;
};

} // namespace syncnorm::host
