#pragma once

#include <algorithm>
#include <cstdint>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace syncnorm::host::detail {

/// Bytes of a core's second-level cache, as far as the system knows them; else a megabyte. Nothing but speed depends on it.
[[nodiscard]] inline std::int64_t second_level_bytes() {
  static std::int64_t const bytes = [] {
    std::int64_t known = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    known = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return known > 0 ? std::clamp<std::int64_t>(known, 1 << 18, 1 << 22) : std::int64_t{1} << 20;
  }();
  return bytes;
}

/// What two blocks of channels may take of it together and still be found there: less than all, since what else is read and
/// where pages lie takes some.
[[nodiscard]] inline std::int64_t room_for_blocks(std::int64_t cache = second_level_bytes()) { return cache / 8 * 5; }

} // namespace syncnorm::host::detail
