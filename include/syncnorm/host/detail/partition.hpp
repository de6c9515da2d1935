#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <span>
#include <tuple>
#include <type_traits>

#include <syncnorm/core/detail/cache_line.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

/// What is contiguous in every view of an operation.
enum class layout : std::uint8_t { rows, channels, strided };

template <class T>
[[nodiscard]] constexpr bool has_rows(tensor_view<T> const& x) {
  return x.spatial > 1 && x.stride_s == 1;
}

template <class T>
[[nodiscard]] constexpr bool has_contiguous_channels(tensor_view<T> const& x) {
  return x.stride_c == 1;
}

template <class... T>
[[nodiscard]] constexpr layout common_layout(tensor_view<T> const&... views) {
  if ((has_rows(views) && ...)) return layout::rows;
  return (has_contiguous_channels(views) && ...) ? layout::channels : layout::strided;
}
template <class T, std::size_t Count>
[[nodiscard]] constexpr layout common_layout(std::array<tensor_view<T>, Count> const& views) {
  return std::apply([](auto const&... x) { return common_layout(x...); }, views);
}

/// Whether the channels of a position are closer to each other than to another position's, but not contiguous.
template <class T>
[[nodiscard]] constexpr bool channels_share_lines(tensor_view<T> const& x) {
  auto const closer_than = [&](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 || std::abs(x.stride_c) < std::abs(stride);
  };
  return common_layout(x) == layout::strided && closer_than(x.spatial, x.stride_s) &&
         closer_than(x.samples, x.stride_n);
}

/// Elements of the shortest rows that are worth vectors along them.
inline constexpr std::int64_t shortest_row = 16;

/// Whether the rows of a sample follow each other without a gap and are too short for vectors: then the positions of a
/// row are better taken for channels, each element of a sample in a lane of its own.
template <class T>
[[nodiscard]] constexpr bool folds(tensor_view<T> const& x) {
  return has_rows(x) && x.spatial < shortest_row && x.stride_c == x.spatial;
}

/// Elements of rows of a few vectors.
template <class T>
inline constexpr std::int64_t few_vectors = 512 / sizeof(accumulate_t<std::remove_const_t<T>>);

/// The same for arithmetic with coefficients of the channel: as long as those of a sample's elements fit the first-level
/// cache, or many samples share them, rows of a few vectors are better off that way, too. Longer ones are not: coefficients are read as
/// often as elements; but of 16 bits, whose rows begin in the midst of a line more often, twice as long ones are, if there are enough to
/// be worth a table.
template <class T>
[[nodiscard]] constexpr bool table_folds(tensor_view<T> const& x) {
  constexpr std::int64_t few = few_vectors<T>, small_table = 1 << 12;
  std::int64_t const long_row = sizeof(T) == 2 && x.samples >= 16 ? 2 * few : few;
  bool const small = x.spatial < long_row && x.size() <= small_table * x.samples;
  bool const shared = x.spatial < few / 2 && x.samples >= 128;
  return has_rows(x) && x.stride_c == x.spatial && (x.spatial < shortest_row || small || shared);
}

/// `x` with its positions taken for channels, `[N, C·S, 1]`.
template <class T>
[[nodiscard]] constexpr tensor_view<T> folded(tensor_view<T> const& x) {
  return {x.data, x.samples, x.channels * x.spatial, 1, x.stride_n, 1, 1};
}

/// Elements from a position to the next, be that of another sample.
template <class T>
[[nodiscard]] constexpr std::int64_t elements_to_next(tensor_view<T> const& x) {
  return x.spatial == 1 ? x.stride_n : x.stride_s;
}

/// Whether samples follow each other like the positions of one do.
template <class T>
[[nodiscard]] constexpr bool samples_follow(tensor_view<T> const& x) {
  return x.samples == 1 || x.spatial == 1 || x.stride_n == x.spatial * x.stride_s;
}

/// Such an `x` as one sample, `[1, C, N·S]`.
template <class T>
[[nodiscard]] constexpr tensor_view<T> as_one_sample(tensor_view<T> const& x) {
  return {x.data, 1, x.channels, x.samples * x.spatial, x.stride_n, x.stride_c, elements_to_next(x)};
}

/// `x` with its samples taken for positions and its positions for samples, `[S, C, N]`.
template <class T>
[[nodiscard]] constexpr tensor_view<T> transposed(tensor_view<T> const& x) {
  return {x.data, x.spatial, x.channels, x.samples, x.stride_s, x.stride_c, x.stride_n};
}
[[nodiscard]] constexpr mask_view transposed(mask_view const& mask) {
  return {mask.data, mask.spatial, mask.samples, mask.stride_s, mask.stride_n};
}

/// Whether tensors with contiguous channels are in the order of memory when they are `transposed`.
template <class... T>
[[nodiscard]] constexpr bool are_position_major(tensor_view<T> const&... views) {
  return ((views.stride_c == 1 && views.stride_n < views.stride_s && views.spatial > 1) && ...);
}

/// Makes one sample of each of some arrays of views, ordered(view) of which follow each other in memory; whether all do.
template <class Ordered, class... Views>
constexpr bool join_samples(Ordered const& ordered, Views&... views) {
  bool const follow = (std::ranges::all_of(views, [&](auto const& x) { return samples_follow(ordered(x)); }) && ...);
  auto const change = [&](auto& x) { x = as_one_sample(ordered(x)); };
  if (follow) (std::ranges::for_each(views, change), ...);
  return follow;
}

/// The same in the order that they have.
template <class... Views>
constexpr bool join_samples_in_order(Views&... views) {
  return join_samples([](auto const& x) { return x; }, views...);
}

/// The same in the order of memory, if there is one for all.
template <class... Views>
constexpr bool make_one_sample(Views&... views) {
  return join_samples_in_order(views...) || join_samples([](auto const& x) { return transposed(x); }, views...);
}

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The length of the parts into which `extent` is cut evenly, none longer than `longest`, and all but
/// the last of a length that is a multiple of 16 or another `unit` that `longest` is one of.
[[nodiscard]] constexpr std::int64_t even_part(std::int64_t extent, std::int64_t longest, std::int64_t unit = 16) {
  return extent <= longest ? extent : ceil_div(ceil_div(extent, ceil_div(extent, longest)), unit) * unit;
}

/// How rows are cut into pieces, the unit of summation. Depends on the extent of a row and the size of its elements alone.
struct row_cut {
  /// The most elements of type `T` in a piece: two of them, beside what is written, leave room in the first-level cache.
  template <class T>
  static constexpr std::int64_t longest = 8192 / static_cast<std::int64_t>(sizeof(T));
  /// Pieces are whole turns of a loop of four of the widest vectors: it then reads a row with one stride, which processors foresee.
  static constexpr std::int64_t unit = 64;

  std::int64_t spatial, length, pieces;

  constexpr row_cut(std::int64_t s, std::int64_t longest_piece)
      : spatial{s}, length{even_part(s, longest_piece, unit)}, pieces{s == 0 ? 0 : ceil_div(s, length)} {}

  [[nodiscard]] constexpr std::int64_t begin(std::int64_t piece) const { return piece * length; }
  [[nodiscard]] constexpr std::int64_t size(std::int64_t piece) const {
    return std::min(length, spatial - piece * length);
  }
};

/// The pieces of a channel, in order of samples, in groups of consecutive pieces. A group is summed about a pivot of its
/// own, and groups merge in order; so the result does not depend on who computes which group.
struct groups {
  static constexpr std::int64_t most = 32, fewest_elements = 512, fewest_pieces = 8, long_piece = 256;

  row_cut cut;
  std::int64_t pieces, length = 1, count = 0;

  template <class T>
  constexpr explicit groups(tensor_view<T> const& x) : groups{x.samples, x.spatial, row_cut::longest<T>} {}
  constexpr groups(std::int64_t samples, std::int64_t spatial, std::int64_t longest_piece)
      : cut{spatial, longest_piece}, pieces{samples * cut.pieces} {
    if (pieces == 0) return;
    // What a group takes beside its rows counts where these are of few vectors: so many groups as 4 KB of them each make up, the last perhaps
    // less, share them evenly.
    std::int64_t const fewest = spatial < shortest_row ? fewest_elements : longest_piece / 2;
    std::int64_t const enough =
        std::max({ceil_div(pieces, most), ceil_div(fewest, cut.length), cut.length >= long_piece ? fewest_pieces : 1});
    count = ceil_div(pieces, enough);
    length = ceil_div(pieces, count);
  }

  struct piece {
    std::int64_t sample, begin, length;
  };

  /// The pieces [begin, end) of group `g`.
  [[nodiscard]] constexpr std::int64_t begin(std::int64_t g) const { return g * length; }
  [[nodiscard]] constexpr std::int64_t end(std::int64_t g) const { return std::min(pieces, begin(g) + length); }

  /// Calls f(piece) for each piece of group `g`.
  template <class F>
  constexpr void for_each_piece(std::int64_t g, F const& f) const {
    piece now = at(begin(g));
    for (std::int64_t left = end(g) - begin(g); left > 0; --left) {
      f(now);
      now = after(now);
    }
  }

  /// Calls f(piece, the one so many pieces later, the one after that) for each piece of group `g`. The latter may be of another
  /// group, or past the last sample.
  template <class F>
  constexpr void for_each_piece(std::int64_t g, std::int64_t later, F const& f) const {
    piece then = at(begin(g) + later);
    for_each_piece(g, [&](piece const& now) {
      piece const next = after(then);
      f(now, then, next);
      then = next;
    });
  }

  /// Whether the pieces of group `g` and of the one after it are as many, and at each place as long as each other.
  [[nodiscard]] constexpr bool matches_next(std::int64_t g) const {
    return begin(g) + 2 * length <= pieces && length % cut.pieces == 0;
  }

  /// Calls f(piece of group `g`, that of the one after it) for each place, if it `matches_next`.
  template <class F>
  [[gnu::always_inline]] constexpr void for_each_two_pieces(std::int64_t g, F const& f) const {
    piece now = at(begin(g)), then = at(begin(g + 1));
    for (std::int64_t left = length; left > 0; --left) {
      f(now, then);
      now = after(now);
      then = after(then);
    }
  }

  /// Calls f(run) for each piece of group `g`, cut into runs of at most `longest` elements.
  template <class F>
  constexpr void for_each_run(std::int64_t g, std::int64_t longest, F const& f) const {
    for_each_piece(g, [&](piece const& now) {
      for (std::int64_t first = 0; first < now.length; first += longest)
        f(piece{now.sample, now.begin + first, std::min(longest, now.length - first)});
    });
  }

  /// Elements of one channel before group `g`, and in it.
  [[nodiscard]] constexpr std::int64_t first_element(std::int64_t g) const { return elements_before(begin(g)); }
  [[nodiscard]] constexpr std::int64_t elements(std::int64_t g) const {
    return first_element(g + 1) - first_element(g);
  }

  /// Piece `i`, which may be past the last.
  [[nodiscard]] constexpr piece at(std::int64_t i) const {
    std::int64_t const part = i % cut.pieces;
    return {i / cut.pieces, cut.begin(part), cut.size(part)};
  }

private:
  [[nodiscard]] constexpr piece after(piece const& p) const {
    bool const ends_row = p.begin + p.length == cut.spatial;
    std::int64_t const begin = ends_row ? 0 : p.begin + p.length;
    return {ends_row ? p.sample + 1 : p.sample, begin, std::min(cut.length, cut.spatial - begin)};
  }

  [[nodiscard]] constexpr std::int64_t elements_before(std::int64_t end) const {
    end = std::min(end, pieces);
    return end / cut.pieces * cut.spatial + end % cut.pieces * cut.length;
  }
};

/// The entries of a `[C]` array that belong to channels [first, first + length); an empty array stays empty.
template <class T>
[[nodiscard]] constexpr std::span<T> channels_of(std::span<T> values, std::int64_t first, std::int64_t length) {
  if (values.empty()) return values;
  return values.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(length));
}

/// Channels [first, first + length) of each view.
template <class T, std::size_t Count>
[[nodiscard]] constexpr std::array<tensor_view<T>, Count> channels_of(std::array<tensor_view<T>, Count> views,
                                                                      std::int64_t first, std::int64_t length) {
  for (auto& view : views) view = view.channel_range(first, length);
  return views;
}

/// So many numbers at most are added to one in the type of the elements' arithmetic where moments are made of the sum. If all are equal
/// and round the same way, the sum of 32 floats loses 2/3·2⁻²⁰ of itself, and m2, where sums all but cancel (`sums_cancel`), ten times
/// that.
inline constexpr std::int64_t longest_sum = 32;

/// Channels that one task reduces: a few rows, a page of a sample's at least where they follow each other, or as wide a part of contiguous
/// channels as there is.
template <class T>
[[nodiscard]] constexpr std::int64_t reduction_chunk(tensor_view<T> const& x) {
  if (common_layout(x) == layout::channels) return std::max<std::int64_t>(1, x.channels);
  std::int64_t const row = x.spatial * static_cast<std::int64_t>(sizeof(T));
  std::int64_t const in_a_page = has_rows(x) && x.stride_c == x.spatial ? 4096 / row : 1;
  return std::max<std::int64_t>({1, in_a_page, (std::int64_t{1} << 20) / std::max<std::int64_t>(1, x.count())});
}

/// Most channels that one task takes at once: a page of elements, whose sums stay in the first-level cache.
template <class A>
inline constexpr std::int64_t chunk_channels = 4096 / static_cast<std::int64_t>(sizeof(A));

/// Of at most `fit` channels, at least one, whose rows of `spatial` elements follow each other without a gap, as many as make up
/// whole lines of the cache, if they are enough. A line that is read or written in two parts takes longer than two lines.
template <class T>
[[nodiscard]] constexpr std::int64_t in_whole_lines(std::int64_t fit, std::int64_t spatial) {
  auto const most = static_cast<std::uint64_t>(std::max<std::int64_t>(1, fit));
  constexpr std::uint64_t line = syncnorm::detail::cache_line;
  std::uint64_t const whole_lines = line / std::gcd(line, static_cast<std::uint64_t>(spatial) * sizeof(T));
  std::uint64_t const step = std::min(whole_lines, std::bit_floor(most));
  return static_cast<std::int64_t>(most / step * step);
}

/// Channels of rows of `spatial` elements to take together, position by position: as many as have values that fit the
/// first-level cache, in whole lines.
template <class T>
[[nodiscard]] constexpr std::int64_t channels_of_table(std::int64_t spatial) {
  return in_whole_lines<T>(chunk_channels<accumulate_t<T>> / spatial, spatial);
}

} // namespace syncnorm::host::detail
