#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>

namespace syncnorm {

/// A borrowed mask `[N, S]` of the positions that count: those whose byte is not 0. A default mask stands for none, by
/// which all positions count. Strides count bytes; any are legal, `stride_s == 1` is fast.
struct mask_view {
  std::uint8_t const* data = nullptr;
  std::int64_t samples = 0, spatial = 0;
  std::int64_t stride_n = 0, stride_s = 0;

  /// Whether there is a mask.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr explicit operator bool() const {
    return data != nullptr || samples != 0 || spatial != 0;
  }

  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr bool operator()(std::int64_t n, std::int64_t s) const {
    return data[n * stride_n + s * stride_s] != 0;
  }
};

/// A dense mask `[N, S]`.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr mask_view mask_of(std::uint8_t const* data, std::int64_t n,
                                                               std::int64_t s) {
  return {data, n, s, s, 1};
}
[[nodiscard]] inline mask_view mask_of(bool const* data, std::int64_t n, std::int64_t s) {
  static_assert(sizeof(bool) == 1);
  return mask_of(reinterpret_cast<std::uint8_t const*>(data), n, s);
}

} // namespace syncnorm
