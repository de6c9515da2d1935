#include "support/allocations.hpp"

#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

extern char const __executable_start, etext; // the linker's

namespace {

std::atomic<std::int64_t> allocations, backend_allocations, live, peak;

/// Whether code at `address` is the program's, in which all of a header-only library is, or of a shared library.
bool is_of_program(void const* address) {
  auto const at = [](auto const& symbol) { return reinterpret_cast<std::uintptr_t>(&symbol); };
  auto const where = reinterpret_cast<std::uintptr_t>(address);
  return where >= at(__executable_start) && where < at(etext);
}

void* counted(void* memory, void const* caller) {
  if (memory == nullptr) throw std::bad_alloc{};
  auto const bytes = static_cast<std::int64_t>(malloc_usable_size(memory));
  (is_of_program(caller) ? allocations : backend_allocations).fetch_add(1, std::memory_order_relaxed);
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

} // namespace

// The other forms of new and delete call these.
void* operator new(std::size_t bytes) {
  return counted(std::malloc(bytes > 0 ? bytes : 1), __builtin_return_address(0));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  auto const a = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(a, (bytes + a - 1) / a * a), __builtin_return_address(0));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace bench {

allocation_count count_allocations() { return {allocations, backend_allocations, live, peak}; }
void reset_peak() { peak = live.load(); }

} // namespace bench
