#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::detail {

/// Whether the number of elements is one, and that of all ranks' positions; of an extent of 0, too, passes take products of the others.
template <class T>
[[nodiscard]] bool is_countable(tensor_view<T> const& x) {
  constexpr std::int64_t one = 1, most_positions = one << 47;
  std::int64_t count = 0, elements = 0;
  return !__builtin_mul_overflow(std::max(one, x.samples), std::max(one, x.spatial), &count) &&
         count <= most_positions && !__builtin_mul_overflow(count, std::max(one, x.channels), &elements);
}

/// Whether elements so far apart can be in one memory. Of a stride that nobody goes by, too, passes take multiples.
template <std::size_t Dimensions>
[[nodiscard]] constexpr bool fits_memory(std::array<std::int64_t, Dimensions> const& extents,
                                         std::array<std::int64_t, Dimensions> const& strides,
                                         std::size_t element_bytes) {
  constexpr std::int64_t most_bytes = std::int64_t{1} << 52;
  std::int64_t const most = most_bytes / static_cast<std::int64_t>(element_bytes);
  for (std::size_t i = 0; i < Dimensions; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<std::int64_t>(1, extents[i] - 1), strides[i], &reach) || reach > most ||
        reach < -most)
      return false;
  }
  return true;
}

template <class T>
[[nodiscard]] constexpr bool fits_memory(tensor_view<T> const& x) {
  return fits_memory<3>({x.samples, x.channels, x.spatial}, {x.stride_n, x.stride_c, x.stride_s}, sizeof(T));
}

[[nodiscard]] inline std::string bracketed(std::int64_t n, std::int64_t c, std::int64_t s) {
  std::string text{"["};
  text.append(std::to_string(n)).append(", ").append(std::to_string(c));
  return text.append(", ").append(std::to_string(s)).append("]");
}

/// For messages: `[N, C, S]`.
template <class T>
[[nodiscard]] std::string extents_of(tensor_view<T> const& x) {
  return bracketed(x.samples, x.channels, x.spatial);
}

template <class T>
[[nodiscard]] std::string strides_of(tensor_view<T> const& x) {
  return bracketed(x.stride_n, x.stride_c, x.stride_s);
}

} // namespace syncnorm::detail
