#pragma once

#include <cstddef>
#include <new>

#include <syncnorm/core/detail/cache_line.hpp>

namespace syncnorm::detail {

/// Gives whole lines of the cache: a vector that lies in two of them takes twice as long to read. In C++23, by clang++ 14
/// and the standard library of g++ 12, std::allocator forgets alignments of more than 16 bytes.
template <class T>
struct line_allocator {
  static_assert(alignof(T) <= cache_line);
  using value_type = T;

  line_allocator() = default;
  template <class U>
  line_allocator(line_allocator<U> const&) {}

  [[nodiscard]] T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), line)); }
  void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, line); }

  template <class U>
  friend bool operator==(line_allocator const&, line_allocator<U> const&) {
    return true;
  }

private:
  static constexpr std::align_val_t line{cache_line};
};

} // namespace syncnorm::detail
