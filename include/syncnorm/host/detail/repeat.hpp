#pragma once

#include <algorithm>
#include <cstdint>

namespace syncnorm::host::detail {

/// Repeats the first `length` of `values`, one at least, up to `size` of them.
template <class T>
void repeat(T* values, std::int64_t length, std::int64_t size) {
  for (; length < size; length *= 2) std::copy_n(values, std::min(length, size - length), values + length);
}

} // namespace syncnorm::host::detail
