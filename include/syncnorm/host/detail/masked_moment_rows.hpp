#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// The elements at `x` that count, one after the other, as numbers. `to` has room for a vector more.
template <class T, class A = accumulate_t<T>>
inline void compact(T const* x, std::uint8_t const* mask, std::int64_t n, A* to) {
  std::int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>)
    for (; i + 16 <= n; i += 16) {
      vector_t<std::uint8_t, 16> sixteen;
      std::memcpy(&sixteen, mask + i, sizeof sixteen);
      __m512i const bytes = _mm512_maskz_cvtepu8_epi32(0xffff, reinterpret<__m128i>(sixteen));
      __mmask16 const counted = _mm512_test_epi32_mask(bytes, bytes);
      _mm512_storeu_ps(to, _mm512_maskz_compress_ps(counted, reinterpret<__m512>(load<16>(x + i))));
      to += __builtin_popcount(counted);
    }
#endif
  for (; i < n; ++i) {
    *to = load<1>(x + i);
    to += mask[i] != 0;
  }
}

/// Moments of the elements that count of a few channels, row piece by row piece; see moment_rows. Elements that do not count
/// may be anything, no numbers, too.
template <class T>
class masked_moment_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;

  /// `x`: up to channels_at_once channels.
  masked_moment_rows(tensor_view<T const> const& x, masked_groups const& parts, layout of)
      : x_{x}, parts_{parts}, contiguous_{of == layout::rows} {}

  void add(std::int64_t c, groups::piece const& now, groups::piece const& next, bool begun, bool fetch = true) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) begun_[i] = false;
    auto const& counted = parts_.mask.at(now);
    if (counted.counted == 0) return;
    std::int64_t const begin = now.begin + counted.first, length = counted.last - counted.first;
    if (contiguous_ && counted.contiguous())
      add_piece(sums_[i], &x_(now.sample, c, begin), length, fetch ? lookahead(x_, c, now, next) : 0, begun_[i]);
    else
      add_some(c, now.sample, begin, length, counted.counted);
    begun_[i] = true;
  }

  void finish(std::int64_t group, double* mean, double* m2) const {
    auto const count = static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      mean[c] = m2[c] = 0;
      if (count > 0) finish_moments(sums_[static_cast<std::size_t>(c)], 1 / count, mean[c], m2[c]);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    moment_rows<T>::merge(before, more, mean, m2, mean_more, m2_more, length);
  }

private:
  [[gnu::noinline]] void add_some(std::int64_t c, std::int64_t sample, std::int64_t begin, std::int64_t length,
                                  std::int64_t counted) {
    auto const i = static_cast<std::size_t>(c);
    std::array<A, static_cast<std::size_t>(row_cut::longest<T>) + native_lanes<A>> row;
    std::uint8_t const* const mask = parts_.mask.row(sample) + begin;
    if (contiguous_) {
      compact(&x_(sample, c, begin), mask, length, row.data());
    } else {
      A* to = row.data();
      for (std::int64_t s = 0; s < length; ++s)
        if (mask[s] != 0) *to++ = load<1>(&x_(sample, c, begin + s));
    }
    add_piece(sums_[i], row.data(), counted, 0, begun_[i]);
  }

  tensor_view<T const> x_;
  masked_groups parts_;
  bool contiguous_;
  std::array<pivoted_sums<A>, static_cast<std::size_t>(channels_at_once)> sums_;
  std::array<bool, static_cast<std::size_t>(channels_at_once)> begun_;
};

} // namespace syncnorm::host::detail
