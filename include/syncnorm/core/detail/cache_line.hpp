#pragma once

#include <cstddef>

namespace syncnorm::detail {

/// Bytes of a line of the cache: those of x86-64 and of most others.
inline constexpr std::size_t cache_line = 64;

} // namespace syncnorm::detail
