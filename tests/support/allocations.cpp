#include "support/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local bool counts = false;
std::atomic<int> allocations{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (counts) ++allocations;
  std::size_t const whole = (bytes + alignment - 1) / alignment * alignment;
  if (void* const memory = std::aligned_alloc(alignment, whole == 0 ? alignment : whole)) return memory;
  throw std::bad_alloc{};
}

} // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace test {

void count_allocations(bool on) { counts = on; }
int take_allocations() { return allocations.exchange(0); }

} // namespace test
