#include "support/allocations.hpp"

#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> allocations, live, peak;

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc{};
  auto const bytes = static_cast<std::int64_t>(malloc_usable_size(memory));
  allocations.fetch_add(1, std::memory_order_relaxed);
  auto const now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  live.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  std::free(memory);
}

void* aligned(std::size_t bytes, std::align_val_t alignment) {
  auto const a = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(a, (bytes + a - 1) / a * a));
}

} // namespace

// The other forms of new and delete call these.
void* operator new(std::size_t bytes) { return counted(std::malloc(bytes > 0 ? bytes : 1)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return aligned(bytes, alignment); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace bench {

allocation_count count_allocations() { return {allocations, live, peak}; }
void reset_peak() { peak = live.load(); }

} // namespace bench
