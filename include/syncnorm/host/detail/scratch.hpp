#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace syncnorm::host::detail {

/// Memory that the calling thread keeps from call to call, so that repeated calls allocate nothing. It is the lease's
/// alone while that lives: leases nest, and an executor may run another operation on a thread that waits for its own.
template <class T>
class scratch_lease {
public:
  explicit scratch_lease(std::int64_t size) {
    auto& kept = pool();
    if (kept.empty()) {
      kept.reserve(8);
    } else {
      memory_ = std::move(kept.back());
      kept.pop_back();
    }
    if (memory_.size() < static_cast<std::size_t>(size)) memory_.resize(static_cast<std::size_t>(size));
  }
  ~scratch_lease() { pool().push_back(std::move(memory_)); }
  scratch_lease(scratch_lease const&) = delete;
  scratch_lease& operator=(scratch_lease const&) = delete;

  [[nodiscard]] T* data() { return memory_.data(); }
  [[nodiscard]] T const* data() const { return memory_.data(); }

private:
  static std::vector<std::vector<T>>& pool() {
    thread_local std::vector<std::vector<T>> kept;
    return kept;
  }

  std::vector<T> memory_;
};

/// An allocator of single objects, of which the calling thread keeps the memory of a few for the next ones.
template <class T>
struct kept_allocator {
  using value_type = T;

  kept_allocator() = default;
  template <class U>
  kept_allocator(kept_allocator<U> const&) {}

  [[nodiscard]] T* allocate(std::size_t n) {
    if (n != 1 || kept().count == 0) return std::allocator<T>{}.allocate(n);
    return kept().free[--kept().count];
  }
  void deallocate(T* memory, std::size_t n) {
    if (n != 1 || kept().count == most) return std::allocator<T>{}.deallocate(memory, n);
    kept().free[kept().count++] = memory;
  }

  template <class U>
  friend bool operator==(kept_allocator const&, kept_allocator<U> const&) {
    return true;
  }

private:
  static constexpr std::size_t most = 8;

  struct memory_of_thread {
    std::array<T*, most> free{};
    std::size_t count = 0;

    ~memory_of_thread() {
      while (count > 0) std::allocator<T>{}.deallocate(free[--count], 1);
    }
  };
  static memory_of_thread& kept() {
    thread_local memory_of_thread memory;
    return memory;
  }
};

} // namespace syncnorm::host::detail
