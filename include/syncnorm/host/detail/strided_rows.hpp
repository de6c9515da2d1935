#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <syncnorm/core/detail/cache_line.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>

// Rows whose positions are not contiguous, as rows that are: kernels work on copies.
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Calls f(channel of so many, position of the piece, element) for channels from `first` on, in the order in which lines of the cache
/// have them.
template <class T, class F>
[[gnu::always_inline]] inline void for_each_strided(tensor_view<T> const& x, std::int64_t first, std::int64_t channels,
                                                    groups::piece const& piece, F const& f) {
  T* const from = &x(piece.sample, first, piece.begin);
  if (channels_share_lines(x)) {
    std::int64_t const later = piece.length > 1 ? 32 * x.stride_s : 0; // a stride to nowhere may be anything
    for (std::int64_t s = 0; s < piece.length; ++s) {
      prefetch<1, 1>(from, s * x.stride_s + later);
      prefetch<1, 1>(from, s * x.stride_s + later + (channels - 1) * x.stride_c);
      for (std::int64_t c = 0; c < channels; ++c) f(c, s, from[c * x.stride_c + s * x.stride_s]);
    }
  } else {
    for (std::int64_t c = 0; c < channels; ++c)
      for (std::int64_t s = 0; s < piece.length; ++s) f(c, s, from[c * x.stride_c + s * x.stride_s]);
  }
}

/// Copies elements to rows of their own type, or of that of their arithmetic, which begin `pitch` apart.
template <class T, class To>
[[gnu::noinline]] void copy_strided(tensor_view<T const> const& x, std::int64_t first, std::int64_t channels,
                                    groups::piece const& piece, To* to, std::int64_t pitch) {
  for_each_strided(x, first, channels, piece, [to, pitch](std::int64_t c, std::int64_t s, T const& element) {
    if constexpr (std::is_same_v<To, T>)
      to[c * pitch + s] = element;
    else
      to[c * pitch + s] = load<1>(&element);
  });
}

/// Copies such rows back.
template <class T>
[[gnu::noinline]] void put_strided(tensor_view<T> const& y, std::int64_t first, std::int64_t channels,
                                   groups::piece const& piece, T const* from, std::int64_t pitch) {
  for_each_strided(y, first, channels, piece,
                   [from, pitch](std::int64_t c, std::int64_t s, T& element) { element = from[c * pitch + s]; });
}

/// Copies of a piece of some channels of tensors, in the type of their arithmetic, for sums that take channel by channel.
template <class T, std::size_t Inputs>
class copied_rows {
  using A = accumulate_t<T>;
  static constexpr std::int64_t at_once = 8;
  /// From row to row: not a page's elements, so that a position's are not all in one set of the cache.
  static constexpr std::int64_t pitch = row_cut::longest<T> + syncnorm::detail::cache_line / sizeof(A);

public:
  using views = std::array<tensor_view<T const>, Inputs>;
  using rows = std::array<A const*, Inputs>;

  /// Of channel `c`. Where channels share lines of the cache, the next ones are copied with it, since they are asked for next.
  [[nodiscard]] rows operator()(views const& in, std::int64_t c, groups::piece const& piece) {
    bool const here = c >= first_ && c < first_ + channels_ && piece.sample == of_.sample && piece.begin == of_.begin;
    if (!here) {
      bool const share = std::ranges::any_of(in, [](auto const& x) { return channels_share_lines(x); });
      copy(in, c, share ? std::min(at_once, in[0].channels - c) : 1, piece);
    }
    return rows_of(c);
  }

  /// Of channel `c` alone.
  [[nodiscard]] rows one(views const& in, std::int64_t c, groups::piece const& piece) {
    copy(in, c, 1, piece);
    return rows_of(c);
  }

private:
  void copy(views const& in, std::int64_t first, std::int64_t channels, groups::piece const& piece) {
    first_ = first;
    channels_ = channels;
    of_ = piece;
    for (std::size_t j = 0; j < Inputs; ++j)
      copy_strided(in[j], first, channels, piece, memory_.data() + static_cast<std::int64_t>(j) * at_once * pitch,
                   pitch);
  }
  [[nodiscard]] rows rows_of(std::int64_t c) const {
    rows each;
    for (std::size_t j = 0; j < Inputs; ++j)
      each[j] = memory_.data() + (static_cast<std::int64_t>(j) * at_once + c - first_) * pitch;
    return each;
  }

  std::int64_t first_ = 0, channels_ = 0;
  groups::piece of_{};
  scratch_lease<A> memory_{static_cast<std::int64_t>(Inputs) * at_once * pitch};
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
