#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// How far a reduction reads ahead at least, in bytes: what arrives while the latency of memory passes.
inline constexpr std::int64_t lookahead_bytes = 2048;

/// The same where channels are contiguous.
inline constexpr std::int64_t far_lookahead_bytes = 8192;

/// Elements from those at hand, of one of `inputs` tensors, to those that are fetched for later.
template <class T>
[[nodiscard]] constexpr std::int64_t elements_ahead(std::size_t inputs) {
  return far_lookahead_bytes / static_cast<std::int64_t>(inputs * sizeof(T));
}

/// The level of cache for which a reduction fetches what it reads of all `x` later: the second, unless that may all be in there.
template <class T>
[[nodiscard]] constexpr int level_to_fetch(tensor_view<T> const& x) {
  return stores_for(x) == stores::streaming ? 2 : 1;
}

/// What sums of rows fetch: what they read so many pieces later, in their order, for a level of cache; 0: nothing.
struct fetching {
  std::int64_t pieces;
  int level;

  /// Of `inputs` tensors like `x`, read in `parts`, all `x` or a block of it.
  template <class T>
  [[nodiscard]] static fetching of(tensor_view<T> const& x, groups const& parts, std::int64_t inputs,
                                   processor const& on = processor::here()) {
    if (on.foresees) return {1, level_to_fetch(x)};
    constexpr std::int64_t far = 12'288, bytes = sizeof(T);
    return {ceil_div(far, std::max<std::int64_t>(1, parts.cut.length) * inputs * bytes), 2};
  }
};

/// What is read later than a piece of some channels: so many channels further on the piece `then`, and the first channels of `next`
/// where these end.
struct read_ahead {
  groups::piece then, next;
  std::int64_t channels;
  int level; ///< of cache, for which it is fetched; 0: it is not

  struct place {
    groups::piece piece;
    std::int64_t channel;
  };

  /// What is read later than channel `c` of so many.
  [[nodiscard]] constexpr place after(std::int64_t c, std::int64_t length) const {
    std::int64_t const to = c + channels;
    return to < length ? place{then, to} : place{next, to - length};
  }
};

/// Elements from piece `now` of channel `c` to what is read later, or further on in the rows that follow each other where pieces are
/// short.
template <class T>
[[nodiscard]] constexpr std::int64_t lookahead(tensor_view<T> const& x, std::int64_t c, groups::piece const& now,
                                               read_ahead const& later) {
  constexpr std::int64_t bytes = sizeof(T);
  if (now.length * bytes < lookahead_bytes) return lookahead_bytes / bytes;
  auto const to = later.after(c, x.channels);
  return (to.channel - c) * x.stride_c + (to.piece.sample - now.sample) * x.stride_n + to.piece.begin - now.begin;
}

/// Calls f(piece, what is read later) for each piece of group `g` of so many channels, which may be none.
template <class F>
void for_each_piece_read(groups const& parts, std::int64_t g, std::int64_t channels, fetching const& fetch,
                         F const& f) {
  std::int64_t const some = std::max<std::int64_t>(1, channels), pieces = fetch.pieces / some,
                     rest = fetch.pieces % some;
  parts.for_each_piece(g, pieces, [&](groups::piece const& now, groups::piece const& then, groups::piece const& next) {
    f(now, read_ahead{then, next, rest, fetch.level});
  });
}

/// What is read later than a piece where groups are read channel by channel, perhaps so many channels further.
struct later_piece {
  groups::piece then;
  std::int64_t channels;

  /// Elements to it from piece `now`.
  template <class T>
  [[nodiscard, gnu::always_inline]] std::int64_t distance(tensor_view<T> const& x, groups::piece const& now) const {
    return channels * x.stride_c + (then.sample - now.sample) * x.stride_n + then.begin - now.begin;
  }
};

/// Calls f(piece, what is read some 4 KB later, or a piece) for each piece of group `g` of channel `c` of so many, of elements of type `T`.
template <class T, class F>
[[gnu::always_inline]] inline void for_each_piece_of_channel(groups const& parts, std::int64_t g, std::int64_t c,
                                                             std::int64_t channels, F const& f) {
  std::int64_t const first = parts.begin(g), count = parts.end(g) - first,
                     later = std::max<std::int64_t>(1, page_elements<T> / parts.cut.length);
  bool const is_last = c + 1 == channels;
  // Of the piece that is read later: not negative in the next channel or group.
  std::int64_t i = later - count;
  parts.for_each_piece(
      g, later,
      [&](groups::piece const& now, groups::piece const& then, groups::piece const&) __attribute__((always_inline)) {
        bool const in_next_channel = i >= 0 && !is_last;
        f(now, in_next_channel ? later_piece{parts.at(first + std::min(i, count - 1)), 1}
                               : later_piece{then, i >= 0 ? -c : 0});
        ++i;
      });
}

/// Whether group `g` and the one after it, of so many tensors, had better be read side by side, where a processor takes turns of vectors:
/// where pieces are not too short, and not of 16-bit elements.
template <class T>
[[nodiscard]] constexpr bool suit_side_by_side(groups const& parts, std::int64_t g, std::size_t inputs) {
  std::int64_t const shortest = static_cast<std::int64_t>(inputs) * 2048;
  return sizeof(T) >= 4 && parts.cut.length * static_cast<std::int64_t>(sizeof(T)) >= shortest && parts.matches_next(g);
}

/// How far moments are fetched ahead then; of several tensors nothing is.
template <class T>
inline constexpr std::int64_t elements_ahead_of_two = 2048 / static_cast<std::int64_t>(sizeof(T));

/// The sums of `rows`, of so many channels, over group `g`. `Rows` has what `moment_rows` has. f(c, piece) after each.
template <class Rows, class F>
void sum_rows(Rows& rows, groups const& parts, std::int64_t g, std::int64_t channels, fetching const& fetch,
              sums_of_channels<Rows::sum_count> const& to, F const& f) {
  bool begun = false;
  for_each_piece_read(parts, g, channels, fetch, [&](groups::piece const& now, read_ahead const& later) {
    for (std::int64_t c = 0; c < channels; ++c) {
      rows.add(c, now, later, begun);
      f(c, now);
    }
    begun = true;
  });
  rows.finish(g, to);
}
template <class Rows>
void sum_rows(Rows& rows, groups const& parts, std::int64_t g, std::int64_t channels, fetching const& fetch,
              sums_of_channels<Rows::sum_count> const& to) {
  sum_rows(rows, parts, g, channels, fetch, to, [](std::int64_t, groups::piece const&) {});
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
