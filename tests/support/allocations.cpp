#include "support/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local bool counts = false;
thread_local int until_failure = -1;
std::atomic<int> allocations{0}, live{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (counts) ++allocations;
  if (until_failure >= 0 && until_failure-- == 0) throw std::bad_alloc{};
  std::size_t const whole = (bytes + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, whole == 0 ? alignment : whole);
  if (memory == nullptr) throw std::bad_alloc{};
  ++live;
  return memory;
}

void release(void* memory) noexcept {
  if (memory != nullptr) --live;
  std::free(memory);
}

} // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
// Sanitizers have ones of their own for arrays, which do not call these.
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace test {

void count_allocations(bool on) { counts = on; }
int take_allocations() { return allocations.exchange(0); }
int live_allocations() { return live; }
void fail_allocation(int n) { until_failure = n; }

} // namespace test
