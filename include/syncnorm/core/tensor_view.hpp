#pragma once

#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>

namespace syncnorm {

/// A borrowed tensor `[N, C, S]`: N samples, C channels, S the product of the spatial extents. Strides count elements;
/// any strides are legal, contiguous rows (`stride_s == 1`) and contiguous channels (`stride_c == 1`) are fast, and so are samples that lie
/// next to each other (`stride_n == 1`), as in a matrix by columns, {data, N, C, 1, 1, N, 1}.
template <class T>
struct tensor_view {
  T* data = nullptr;
  std::int64_t samples = 0, channels = 0, spatial = 0;
  std::int64_t stride_n = 0, stride_c = 0, stride_s = 0;

  /// Whether it is anything but a default view, which stands for none.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr bool is_given() const {
    return data != nullptr || samples != 0 || channels != 0 || spatial != 0;
  }
  /// Elements of the whole tensor, N·C·S.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t size() const { return samples * channels * spatial; }
  /// Elements of one channel, N·S.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t count() const { return samples * spatial; }

  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr T& operator()(std::int64_t n, std::int64_t c, std::int64_t s) const {
    return data[n * stride_n + c * stride_c + s * stride_s];
  }

  /// Channels [first, first + length), without a copy.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view channel_range(std::int64_t first,
                                                                         std::int64_t length) const {
    tensor_view part = *this;
    if (data != nullptr) part.data = data + first * stride_c;
    part.channels = length;
    return part;
  }

  /// Samples [first, first + length), without a copy.
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view sample_range(std::int64_t first, std::int64_t length) const {
    tensor_view part = *this;
    if (data != nullptr) part.data = data + first * stride_n;
    part.samples = length;
    return part;
  }

  template <class Const>
  requires(!std::is_const_v<T> && std::is_same_v<Const, T const>) SYNCNORM_HOST_DEVICE constexpr
  operator tensor_view<Const>() const {
    return {data, samples, channels, spatial, stride_n, stride_c, stride_s};
  }
};

/// `[N, C, S]` with contiguous rows, as in NCHW (S = H·W), NCW and NCDHW.
template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view<T> nchw(T* data, std::int64_t n, std::int64_t c,
                                                                 std::int64_t s) {
  return {data, n, c, s, c * s, s, 1};
}

/// `[N, S, C]` with contiguous channels, as in NHWC (S = H·W) and torch's channels_last.
template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view<T> nhwc(T* data, std::int64_t n, std::int64_t c,
                                                                 std::int64_t s) {
  return {data, n, c, s, s * c, 1, c};
}

/// A matrix of N samples and C features.
template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view<T> nc(T* data, std::int64_t n, std::int64_t c) {
  return {data, n, c, 1, c, 1, 1};
}

/// `[T, B, C]`, a batch of B sequences of T positions, time outermost: N = B, S = T.
template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr tensor_view<T> tbc(T* data, std::int64_t t, std::int64_t b,
                                                                std::int64_t c) {
  return {data, b, c, t, c, 1, b * c};
}

} // namespace syncnorm
