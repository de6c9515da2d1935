#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace syncnorm::host::detail {

/// What the schedule of a pass depends on. Nothing but speed does.
struct processor {
  /// Bytes of a core's second-level cache, as far as the system knows them; else a megabyte.
  std::int64_t second_level = std::int64_t{1} << 20;
  /// Whether a core goes on fetching ahead by itself where a loop ends and another begins, on the next row or on what is written.
  /// AMD's (Zen 4 and 5) begin anew: they follow the stride of each instruction that reads.
  bool foresees = true;
  /// Whether to sum rows and map others in one loop, a few vectors in turn. AMD's Zen 5 had better, and Intel's Ice Lake, of which a core
  /// reads memory slowly and writes it meanwhile at no cost.
  bool interleaves_rows = false;
  /// Whether a core reads several tensors from memory at once as fast by itself as it does what is fetched, or faster. AMD's Zen 5 does.
  bool follows_streams = false;

  /// What two blocks of channels may take of the cache together and still be found there: less than all, since what else is read
  /// and where pages lie takes some, of Intel's Ice Lake more.
  [[nodiscard]] std::int64_t room_for_blocks() const {
    return second_level / 8 * (foresees && interleaves_rows ? 4 : 5);
  }

  /// The same of a block that is mapped and the next one, which is fetched meanwhile. What AMD's second level has no room for, the third
  /// takes, of which a core's part is 2 to 4 MB, and more while others rest.
  [[nodiscard]] std::int64_t room_for_next() const { return foresees ? room_for_blocks() : std::int64_t{8} << 20; }

  /// What the rows of a block in one sample had better take at most, unless they take far more: where reading begins anew with each
  /// sample, a page.
  [[nodiscard]] std::int64_t longest_run() const {
    return foresees ? std::numeric_limits<std::int64_t>::max() : std::int64_t{1} << 12;
  }

  /// What they have to take at least: of less, everything is sooner read twice.
  [[nodiscard]] std::int64_t shortest_run() const { return std::int64_t{1} << (foresees ? 11 : 10); }

  /// Whether to have it find the pages of what is read and written later (`find_pages`). AMD's wait for each page that a store which streams
  /// meets; others hide that, and what is fetched with a page takes them more.
  [[nodiscard]] bool finds_pages_ahead() const { return !foresees; }

  /// Whether to interleave only rows that are whole lines of the cache. Others are not measured on AMD's.
  [[nodiscard]] bool interleaves_lines() const { return !foresees; }

  /// Whether a map had better fetch what it reads next, of so many tensors that have so many bytes together: not from memory, where that
  /// is followed, but what may be in the third level.
  [[nodiscard]] bool fetches_streams(std::int64_t tensors, std::int64_t bytes) const {
    return !follows_streams || tensors == 1 || bytes <= std::int64_t{1} << 26;
  }

  /// The one at hand.
  [[nodiscard]] static processor const& here() {
    static processor const found = [] {
      processor of;
#if defined(_SC_LEVEL2_CACHE_SIZE)
      if (std::int64_t const known = sysconf(_SC_LEVEL2_CACHE_SIZE); known > 0)
        of.second_level = std::clamp<std::int64_t>(known, 1 << 18, 1 << 22);
#endif
#if defined(__x86_64__) && defined(__GNUC__)
      __builtin_cpu_init();
      of.foresees = __builtin_cpu_is("amd") == 0;
      of.follows_streams = !of.foresees && family() >= 0x1a;
      of.interleaves_rows = of.follows_streams || __builtin_cpu_is("icelake-server") != 0;
#endif
      return of;
    }();
    return found;
  }

private:
#if defined(__x86_64__) && defined(__GNUC__)
  /// AMD's number of a generation: 0x19 of Zen 3 and 4, 0x1a of Zen 5.
  static unsigned family() {
    unsigned version = 0, unused = 0;
    __get_cpuid(1, &version, &unused, &unused, &unused);
    return (version >> 8 & 0xf) + (version >> 20 & 0xff);
  }
#endif
};

} // namespace syncnorm::host::detail
