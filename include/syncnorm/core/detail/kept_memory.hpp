#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include <syncnorm/core/detail/cache_line.hpp>

namespace syncnorm::detail {

/// What the calling thread keeps; null once its variables of thread storage are gone, as they are before static ones.
template <class Kept>
[[nodiscard]] Kept* kept_by_thread() {
  thread_local bool gone = false;
  struct holder {
    Kept kept;
    ~holder() { gone = true; }
  };
  if (gone) return nullptr;
  thread_local holder of_thread;
  return &of_thread.kept;
}

/// An allocator whose memory the calling thread keeps when it is given back, for the next array of the same size: so repeated
/// calls allocate nothing. It keeps the latest few.
template <class T>
struct kept_allocator {
  using value_type = T;

  kept_allocator() = default;
  template <class U>
  kept_allocator(kept_allocator<U> const&) {}

  [[nodiscard]] T* allocate(std::size_t n) {
    if (auto* const kept = kept_by_thread<memory_of_thread>(); kept != nullptr)
      for (auto i = kept->count; i-- > 0;)
        if (kept->arrays[i].size == n) return kept->remove(i);
    return std::allocator<T>{}.allocate(n);
  }
  void deallocate(T* memory, std::size_t n) noexcept {
    auto* const kept = kept_by_thread<memory_of_thread>();
    if (kept == nullptr) return std::allocator<T>{}.deallocate(memory, n);
    if (kept->count == most) kept->free_oldest();
    kept->arrays[kept->count++] = {memory, n};
  }

  template <class U>
  friend bool operator==(kept_allocator const&, kept_allocator<U> const&) {
    return true;
  }

private:
  static constexpr std::size_t most = 64;

  struct array {
    T* memory;
    std::size_t size;
  };
  struct memory_of_thread {
    std::array<array, most> arrays{}; // the oldest first
    std::size_t count = 0;

    ~memory_of_thread() {
      while (count > 0) free_oldest();
    }
    void free_oldest() noexcept {
      auto const size = arrays[0].size;
      std::allocator<T>{}.deallocate(remove(0), size);
    }
    T* remove(std::size_t i) noexcept {
      T* const memory = arrays[i].memory;
      std::copy(arrays.data() + i + 1, arrays.data() + count, arrays.data() + i);
      --count;
      return memory;
    }
  };
};

template <class T>
using kept_vector = std::vector<T, kept_allocator<T>>;

/// Has `new T` use a `kept_allocator`; `T`, aligned to a line of the cache at most, derives from this. No template: at -O0 g++ 12
/// ends with an internal error over an operator new whose name has _Float16 in it.
struct in_kept_memory {
  // NOLINTNEXTLINE(misc-new-delete-overloads): what matches is the delete that is told a size
  [[nodiscard]] static void* operator new(std::size_t bytes) { return kept_allocator<unit>{}.allocate(units(bytes)); }
  static void operator delete(void* memory, std::size_t bytes) noexcept {
    kept_allocator<unit>{}.deallocate(static_cast<unit*>(memory), units(bytes));
  }

private:
  struct alignas(cache_line) unit {
    std::array<std::byte, cache_line> bytes;
  };
  static constexpr std::size_t units(std::size_t bytes) { return (bytes + sizeof(unit) - 1) / sizeof(unit); }
};

} // namespace syncnorm::detail
