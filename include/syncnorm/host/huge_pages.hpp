#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if __has_include(<sys/mman.h>) && __has_include(<unistd.h>)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// Asks for the `bytes` at `data` in pages of 2 MB, and has those that are new to the process given to it, by all threads of `exec`.
/// Their values stay as they are.
///
/// For an output in memory that was just allocated: glibc, for one, has more than 32 MB anew from the system each time, and the pass
/// that writes there first waits for every page of 4 KB, which may take several times as long as its arithmetic. Where the system has
/// no such pages (Linux: `transparent_hugepage/enabled`, `PR_SET_THP_DISABLE`), nothing changes. Local.
inline void use_huge_pages([[maybe_unused]] executor_ref exec, [[maybe_unused]] void* data,
                           [[maybe_unused]] std::size_t bytes) {
#if defined(MADV_HUGEPAGE) && defined(_SC_PAGESIZE)
  if (bytes == 0) return;
  constexpr std::uintptr_t huge = std::uintptr_t{1} << 21;
  static auto const page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* const first = static_cast<unsigned char*>(data);
  auto const begin = reinterpret_cast<std::uintptr_t>(data), end = begin + bytes, before = begin % page;
  if (madvise(first - before, before + bytes, MADV_HUGEPAGE) != 0) return; // this system has none
  auto const count = static_cast<std::int64_t>((end - 1) / huge - begin / huge + 1);
  exec.for_each(count, [&](std::int64_t i) {
    std::uintptr_t const there = (begin / huge + static_cast<std::uintptr_t>(i)) * huge;
    __atomic_fetch_or(first + (std::max(there, begin) - begin), 0, __ATOMIC_RELAXED); // a write that changes nothing
  });
#endif
}

} // namespace syncnorm::host
