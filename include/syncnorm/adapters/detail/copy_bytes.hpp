#pragma once

#include <cstddef>
#include <cstring>

namespace syncnorm::detail {

/// Pointers may be null where there is nothing to copy, and what is there already stays.
inline void copy_bytes(void* to, void const* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

} // namespace syncnorm::detail
