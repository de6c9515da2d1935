#pragma once

#include <cstdint>

namespace bench {

/// The traffic that a pass cannot avoid: `out[i] = a[i]`, or `out[i] = a[i] + b[i]` where b is given, of so many bytes,
/// written past the cache, by `threads` threads of OpenMP. Multiples of 4096 bytes are aligned to 64.
void floor_copy(void* out, void const* a, void const* b, std::int64_t bytes, int threads);

/// The reading alone, for what writes nothing but a few values per channel.
void floor_read(void const* a, void const* b, std::int64_t bytes, int threads);

} // namespace bench
