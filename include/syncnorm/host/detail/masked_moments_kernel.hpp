#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/moments_kernel.hpp>
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

/// Moments of the elements that count, over one group of pieces; see reduce_channels. Elements that do not count may be
/// anything, no numbers, too.
template <class T>
class masked_moments_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  static constexpr std::int64_t rows_at_once = 8;

public:
  masked_moments_kernel(tensor_view<T const> const& x, masked_groups const& parts)
      : x_{x}, parts_{parts}, layout_{common_layout(x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* mean,
                                    double* m2) const {
    std::fill_n(mean, length, 0.0);
    std::fill_n(m2, length, 0.0);
    if (parts_.elements(group) == 0) return;
    tensor_view<T const> const x = x_.channel_range(first, length);
    constexpr int lanes = native_lanes<A>;
    if (layout_ != layout::channels) {
      rows(x, group, mean, m2);
    } else {
      length >= lanes ? elements<lanes>(x, group, mean, m2) : elements<1>(x, group, mean, m2);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* mean, double* m2, double const* mean_more,
                    double const* m2_more, std::int64_t length) {
    moments_kernel<T>::merge(before, more, mean, m2, mean_more, m2_more, length);
  }

private:
  /// Σ (x − pivot) and Σ (x − pivot)² of a channel. The pivot is the mean of its first piece.
  struct shifted {
    double pivot, first, second;
  };

  void rows(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    std::array<shifted, most> sums;
    std::array<A, static_cast<std::size_t>(row_cut::longest) + native_lanes<A>> row;
    bool begun = false;
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const& next) {
      auto const& counted = parts_.mask.at(now);
      if (counted.counted == 0) return;
      std::int64_t const begin = now.begin + counted.first, length = counted.last - counted.first;
      std::uint8_t const* const mask = parts_.mask.row(now.sample) + begin;
      for (std::int64_t c = 0; c < x.channels; ++c) {
        auto& sum = sums[static_cast<std::size_t>(c)];
        if (layout_ == layout::rows && counted.contiguous()) {
          add(sum, &x(now.sample, c, begin), length, lookahead(x, c, now, next), begun);
        } else {
          if (layout_ == layout::rows) {
            compact(&x(now.sample, c, begin), mask, length, row.data());
          } else {
            A* to = row.data();
            for (std::int64_t s = 0; s < length; ++s)
              if (mask[s] != 0) *to++ = load<1>(&x(now.sample, c, begin + s));
          }
          add(sum, row.data(), counted.counted, 0, begun);
        }
      }
      begun = true;
    });
    finish(
        group, x.channels, [&](std::int64_t c) { return sums[static_cast<std::size_t>(c)]; }, mean, m2);
  }

  /// `n` elements, all of which count.
  template <class X>
  static void add(shifted& sum, X const* x, std::int64_t n, std::int64_t ahead, bool begun) {
    constexpr int lanes = native_lanes<A>;
    constexpr std::int64_t pilot = 16;
    using vector = vector_t<A, lanes>;
    A pivot = load<1>(x), first = 0, second = 0;
    if (n >= pilot) {
      A pilot_sum = 0;
      for (std::int64_t i = 1; i < pilot; ++i) pilot_sum += load<1>(x + i) - pivot;
      pivot += pilot_sum / pilot;
    }
    if (n < lanes) {
      for (std::int64_t i = 0; i < n; ++i) {
        A const d = load<1>(x + i) - pivot;
        first += d;
        second += d * d;
      }
    } else {
      vector const p = splat<A, lanes>(pivot);
      std::array<vector, 4> firsts{}, seconds{};
      auto const take = [&](std::size_t k, vector const& d) {
        firsts[k] += d;
        seconds[k] += d * d;
      };
      std::int64_t i = 0;
      for (; i + 4 * lanes <= n; i += 4 * lanes) {
        if (ahead != 0) prefetch<4 * lanes>(x, i + ahead);
        take(0, load<lanes>(x + i) - p);
        take(1, load<lanes>(x + i + lanes) - p);
        take(2, load<lanes>(x + i + 2 * lanes) - p);
        take(3, load<lanes>(x + i + 3 * lanes) - p);
      }
      for (; i + lanes <= n; i += lanes) take(0, load<lanes>(x + i) - p);
      if (i < n) take(1, keep_last<A, lanes>(load<lanes>(x + n - lanes) - p, static_cast<int>(n - i)));
      first = sum_lanes<A, lanes>((firsts[0] + firsts[1]) + (firsts[2] + firsts[3]));
      second = sum_lanes<A, lanes>((seconds[0] + seconds[1]) + (seconds[2] + seconds[3]));
    }
    auto const count = static_cast<double>(n), a = static_cast<double>(first);
    if (!begun) sum = {static_cast<double>(pivot) + a / count, 0, 0};
    double const t = static_cast<double>(pivot) - sum.pivot;
    sum.first += a + count * t;
    sum.second += static_cast<double>(second) + t * (2 * a + count * t);
  }

  /// Contiguous channels: the sums of some positions that count at a time go into double.
  template <int L>
  void elements(tensor_view<T const> const& x, std::int64_t group, double* mean, double* m2) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const slots{x.channels};
    std::array<A, most> pivots;
    std::array<double, most> first, second;
    std::fill_n(first.data(), slots.size(), 0.0);
    std::fill_n(second.data(), slots.size(), 0.0);
    std::array<T const*, static_cast<std::size_t>(rows_at_once)> from;
    std::size_t waiting = 0;
    bool begun = false;
    auto const flush = [&] {
      if (waiting == 0) return;
      if (!begun) {
        slots.for_each([&](std::int64_t slot, std::int64_t c) {
          vector const base = load<L>(from[0] + c);
          vector sum{};
          for (std::size_t r = 1; r < waiting; ++r) sum += load<L>(from[r] + c) - base;
          store<L>(&pivots[static_cast<std::size_t>(slot)],
                   base + sum * static_cast<A>(1 / static_cast<double>(waiting)));
        });
        begun = true;
      }
      slots.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot);
        vector const p = load<L>(&pivots[i]);
        vector a{}, b{};
        for (std::size_t r = 0; r < waiting; ++r) {
          vector const d = load<L>(from[r] + c) - p;
          a += d;
          b += d * d;
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const&) {
      auto const& counted = parts_.mask.at(now);
      std::uint8_t const* const mask = parts_.mask.row(now.sample) + now.begin;
      for (std::int64_t s = counted.first; s < counted.last; ++s) {
        if (mask[s] == 0) continue;
        from[waiting++] = &x(now.sample, 0, now.begin + s);
        if (waiting == from.size()) flush();
      }
    });
    flush();
    slots.for_each([&](std::int64_t slot, std::int64_t c) {
      finish(
          group, L,
          [&](std::int64_t lane) {
            auto const i = static_cast<std::size_t>(slot + lane);
            return shifted{static_cast<double>(pivots[i]), first[i], second[i]};
          },
          mean + c, m2 + c);
    });
  }

  template <class Sums>
  void finish(std::int64_t group, std::int64_t channels, Sums const& sums, double* mean, double* m2) const {
    double const inverse = 1 / static_cast<double>(parts_.elements(group));
    for (std::int64_t c = 0; c < channels; ++c) {
      shifted const sum = sums(c);
      mean[c] = sum.pivot + sum.first * inverse;
      // A NaN stays one: max returns its first argument unless that is the smaller.
      m2[c] = std::max(sum.second - sum.first * sum.first * inverse, 0.0);
    }
  }

  tensor_view<T const> x_;
  masked_groups const& parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
