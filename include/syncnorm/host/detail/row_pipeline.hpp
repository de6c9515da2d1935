#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/block_team.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/linear_op.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/detail/vector.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Whether `row_pipeline` can take blocks of so many channels.
template <class Rows, class T, std::size_t Inputs, std::size_t Outputs>
[[nodiscard]] bool suits_row_pipeline(channel_blocks const& blocks, std::array<tensor_view<T const>, Inputs> const& in,
                                      std::array<tensor_view<T>, Outputs> const& out) {
  auto const rows = [&](auto const& x) { return has_rows(x) && !table_folds(x.channel_range(0, blocks.length)); };
  return !are_short_rows(in[0].spatial) && std::ranges::all_of(in, rows) && std::ranges::all_of(out, rows) &&
         blocks.size(blocks.count - 1) <= Rows::channels_at_once;
}

/// What a map fetches while it computes. What is summed next is fetched by it, or else while elements are summed, as suits a map that
/// takes no longer than that.
enum class map_fetches : std::uint8_t {
  nothing,
  next_sums,  ///< what is summed next
  next_piece, ///< what it maps next, where that has not been summed
};

/// What a pipeline reads: `summed` of the map's inputs, the first ones, are summed.
struct pipeline_reading {
  std::int64_t summed;
  map_fetches fetched;
};

/// The sums of a block over each group of pieces, as `merge_groups` takes them; not all of them are used.
template <class Rows>
using group_sums = std::array<double, Rows::sum_count* static_cast<std::size_t>(groups::most* Rows::channels_at_once)>;

/// Sums the rows of one block of channels while it maps those of the block before, row piece by row piece in turn: then
/// memory is read and written and the cache is read at the same time. The map takes samples in the opposite order: what was
/// read last is the likeliest to be in the cache still. Where two blocks do not fit, the map takes several pieces in a turn, so
/// that the block before is done with when as much of the next as fits beside it has been read. `Rows` has what `moment_rows`
/// has, `Map` is an `elementwise_map`, `Parts` are the groups of pieces, masked ones perhaps.
///
/// On a processor that would lose what it foresees by such turns, sums a block, and maps it while it fetches the next. One that had
/// better takes turns of a few vectors, in one loop, where the map can.
template <class T, class Rows, class Map, class Parts>
class row_pipeline {
public:
  /// `block`: the extents of what is mapped at a time, in so many `shares`. `interleaves`: by turns of a few vectors.
  row_pipeline(tensor_view<T const> const& block, Parts const& parts, pipeline_reading const& reading, bool interleaves,
               std::int64_t shares = 1, processor const& on = processor::here())
      : parts_{parts}, samples_{block.samples}, shares_{shares}, takes_turns_{on.foresees}, fetched_{reading.fetched},
        reads_long_rows_{reading.summed == 1 && sizeof(T) >= 4 &&
                         parts.cut.spatial * static_cast<std::int64_t>(sizeof(T)) >= long_row},
        interleaves_{interleaves},
        fetch_{takes_turns_ ? fetching{1, 2} : fetching::of(block, parts, reading.summed, on)}, lead_{parts.pieces} {
    suit_cache(reading.summed, block.size() * static_cast<std::int64_t>(sizeof(T)) / shares, on);
  }

  /// Whether a block is mapped while the next one is summed.
  [[nodiscard]] bool maps_later() const { return takes_turns_ || interleaves_; }

  /// Maps a block of so many channels by itself, and fetches the next.
  void map_block(Map const& map, std::int64_t channels, next_block const& fetch) const {
    map(boxes::box{0, channels, 0, samples_, 0, parts_.cut.spatial}, fetch.channels_ahead);
  }

  /// Maps a share of a block of so many channels by itself.
  void map_share(Map const& map, std::int64_t share, std::int64_t channels) const {
    auto const of = share_of(share);
    if (!interleaves_)
      return map(boxes::box{0, channels, of.sample, of.samples_end - of.sample, 0, parts_.cut.spatial});
    for (std::int64_t g = of.group; g < of.groups_end; ++g)
      parts_.for_each_piece(g, [&](groups::piece const& now) {
        for (std::int64_t c = 0; c < channels; ++c) map(of_row(now, c, channels), std::nullopt);
      });
  }

  /// The sums of `rows`, of `length` channels, which are `fetched` already or not, over each group of a share, to
  /// `sums`; meanwhile maps that share of the `mapped` channels before these by `map`, no more.
  [[gnu::noinline]] void operator()(Rows& rows, std::int64_t share, std::int64_t length, double* sums, Map const* map,
                                    std::int64_t mapped, bool fetched = false) const {
    if (map != nullptr && interleaves_) return interleave(rows, share, length, sums, *map, mapped);
    fetching const fetch = fetched && reads_long_rows_ ? fetching{0, 0} : fetch_;
    auto const of = share_of(share);
    std::int64_t const to_map = map == nullptr ? 0 : of.pieces_to_map,
                       pieces = parts_.end(of.groups_end - 1) - parts_.begin(of.group),
                       lead = std::max<std::int64_t>(1, pieces * lead_ / parts_.pieces),
                       both = std::min(length, mapped);
    std::int64_t summed = 0, done = 0;
    for (std::int64_t g = of.group; g < of.groups_end; ++g) {
      bool begun = false;
      for_each_piece_read(parts_, g, length, fetch, [&](groups::piece const& now, read_ahead later) {
        std::int64_t const due = std::min(to_map, ceil_div(++summed * to_map, lead)) - done;
        bool const next_sums = fetched_ == map_fetches::next_sums && due == 1 && !is_short(now);
        if (next_sums) later.level = 0;
        for (std::int64_t c = 0; c < length; ++c) {
          rows.add(c, now, later, begun);
          if (due == 0 || c >= both) continue;
          if (next_sums) {
            auto const piece = piece_to_map(of, done, c, both);
            bool const ends_share = length == 1 && summed == pieces;
            auto const [to_fetch, channel] = ends_share ? begin_of_next(of) : later.after(c, length);
            (*map)(piece, from_to(piece, to_fetch.sample, mapped + channel, to_fetch.begin));
          } else {
            map_piece(*map, of, done, c, both);
          }
        }
        for (std::int64_t i = done + 1; i < done + due; ++i)
          for (std::int64_t c = 0; c < both; ++c) map_piece(*map, of, i, c, both);
        done += due;
        begun = true;
      });
      if (g != 0 && parts_.elements(g) == 0) continue;
      rows.finish(g, sums_of_group<Rows::sum_count>(sums, length, g));
    }
  }

private:
  /// The sums of the groups of a share, one or two at a time, a few vectors of each in turn with as many of the pieces of `map` at the same
  /// places.
  [[gnu::noinline]] void interleave(Rows& rows, std::int64_t share, std::int64_t length, double* sums, Map const& map,
                                    std::int64_t mapped) const {
    if constexpr (std::is_same_v<Parts, groups>) {
      std::int64_t const both = std::min(length, mapped);
      auto const of = share_of(share);
      auto const to = [&](std::int64_t g) { return sums_of_group<Rows::sum_count>(sums, length, g); };
      bool const in_lines = map.are_in_lines(parts_.cut);
      auto const map_ends = [&](std::int64_t c, std::int64_t g) {
        if (!in_lines)
          parts_.for_each_piece(g, [&](groups::piece const& of_group) { map.ends(of_row(of_group, c, both)); });
      };
      for (std::int64_t g = of.group; g < of.groups_end; ++g) {
        if constexpr (Rows::reads_side_by_side)
          if (length <= mapped && g + 1 < of.groups_end && suit_side_by_side<T>(parts_, g, Map::inputs)) {
            for (std::int64_t c = 0; c < length; ++c) {
              rows.sum_two_interleaved(c, parts_, g, map.interleaved(c), to(g), to(g + 1));
              map_ends(c, g);
              map_ends(c, g + 1);
            }
            ++g;
            continue;
          }
        for (std::int64_t c = 0; c < both; ++c) {
          rows.add_interleaved(c, parts_, g, map.interleaved(c));
          map_ends(c, g);
        }
        bool begun = false;
        if (both < length)
          for_each_piece_read(parts_, g, length, fetching{1, 1},
                              [&](groups::piece const& now, read_ahead const& later) {
                                for (std::int64_t c = both; c < length; ++c) rows.add(c, now, later, begun);
                                begun = true;
                              });
        rows.finish(g, to(g));
      }
    }
  }

  /// Bytes of rows of one tensor that a processor, once they are in some level of the cache, reads faster by itself; of 16-bit elements,
  /// whose arithmetic takes longer, it does not.
  static constexpr std::int64_t long_row = 1 << 15;

  /// Has `bytes` of so many tensors mapped before more of the next ones is read than fits beside them; not where both fit, nor where not
  /// even they do, which are read from memory again in any case. Of several tensors it is a gain where none of the next fits: memory takes
  /// longer to read than to write.
  void suit_cache(std::int64_t inputs, std::int64_t bytes, processor const& on) {
    std::int64_t const all = inputs * bytes, room = on.room_for_blocks();
    bool const fits = all <= room, next_fits = 2 * all <= room;
    if (!next_fits && all <= on.second_level && (inputs == 1 || !fits))
      lead_ = std::max<std::int64_t>(1, lead_ * std::max<std::int64_t>(0, room - all) / all);
  }

  /// Short pieces the map fetches too late.
  static bool is_short(groups::piece const& piece) {
    return piece.length * static_cast<std::int64_t>(sizeof(T)) < 4096;
  }

  /// What a thread sums of a block, groups of pieces, and the samples that it maps, mostly the same.
  struct part {
    std::int64_t group, groups_end, sample, samples_end, pieces_to_map;
  };
  [[nodiscard]] part share_of(std::int64_t share) const {
    auto const group = [&](std::int64_t i) { return i * parts_.count / shares_; };
    auto const sample = [&](std::int64_t i) { return ceil_div(i * samples_, shares_); };
    std::int64_t const begin = sample(share), end = sample(share + 1);
    return {group(share), group(share + 1), begin, end, (end - begin) * parts_.cut.pieces};
  }

  /// Of blocks of one channel, where a share of the next one begins.
  [[nodiscard]] read_ahead::place begin_of_next(part const& of) const {
    auto const& cut = parts_.cut;
    std::int64_t const first = parts_.begin(of.group), of_row = first % cut.pieces;
    return {{first / cut.pieces, cut.begin(of_row), cut.size(of_row)}, 1};
  }

  /// A piece of channel `c` of so many.
  [[nodiscard]] row_piece of_row(groups::piece const& piece, std::int64_t c, std::int64_t channels) const {
    return part_of_row<T>(parts_.cut, piece.sample, c, channels, piece.begin / parts_.cut.length);
  }

  /// The piece at place `i` in the order of mapping a share, of channel `c` of so many.
  [[nodiscard]] row_piece piece_to_map(part const& of, std::int64_t i, std::int64_t c, std::int64_t channels) const {
    auto const& cut = parts_.cut;
    return part_of_row<T>(cut, of.samples_end - 1 - i / cut.pieces, c, channels, i % cut.pieces);
  }
  static row_distance from_to(row_piece const& piece, std::int64_t sample, std::int64_t channel,
                              std::int64_t position) {
    return {channel - piece.channel, sample - piece.sample, position - piece.begin};
  }

  void map_piece(Map const& map, part const& of, std::int64_t i, std::int64_t c, std::int64_t channels) const {
    auto const piece = piece_to_map(of, i, c, channels);
    std::optional<row_distance> next;
    if (fetched_ == map_fetches::next_piece && i + 1 < of.pieces_to_map) {
      auto const then = piece_to_map(of, i + 1, c, channels);
      next = from_to(piece, then.sample, c, then.begin);
    }
    map(piece, next);
  }

  Parts parts_;
  std::int64_t samples_, shares_;
  bool takes_turns_;
  map_fetches fetched_;
  bool reads_long_rows_;
  bool interleaves_;
  fetching fetch_;
  std::int64_t lead_; ///< how many pieces of a block may be summed until the block before has to be mapped
};

/// Whether a pipeline had better take turns of a few vectors, if its map can: not, on AMD's processors, of shorter pieces of 16-bit elements;
/// on others, not where these vectors are less than a line of the cache, of which half would be written at a time, nor of several tensors of
/// 16-bit elements in registers of 32 bytes, which are too few for that.
template <class T>
[[nodiscard]] constexpr bool suits_turns_of_vectors(groups const& parts, pipeline_reading const& reading,
                                                    processor const& on) {
  constexpr bool of_lines = 4 * native_lanes<accumulate_t<T>> >= line_elements<T>;
  bool const suits_registers = sizeof(T) >= 4 || simd_bytes > 32 || reading.summed == 1;
  bool const of_some_length = sizeof(T) >= 4 || parts.cut.length * static_cast<std::int64_t>(sizeof(T)) >= 3 << 10;
  return on.interleaves_rows && (on.foresees ? of_lines && suits_registers : of_some_length) && reading.summed <= 2 &&
         reading.fetched != map_fetches::next_piece;
}

/// Whether `map_and_sum_rows` may be worth a try on `out` and, after it, `next_channels` more channels.
template <class Rows, class T, std::size_t Inputs>
[[nodiscard]] bool suits_map_and_sum(executor_ref exec, std::array<tensor_view<T const>, Inputs> const& in,
                                     tensor_view<T> const& out, std::int64_t next_channels, processor const& on) {
  return (on.foresees || on.interleaves_rows) && exec.concurrency() == 1 && out.size() != 0 &&
         next_channels <= Rows::channels_at_once &&
         suits_row_pipeline<Rows>(channel_blocks{out.channels, out.channels}, in, std::array{out});
}

/// `out` by a `linear_op`, and meanwhile the `sums` by `rows` of the `length` channels after those of `out`; or nothing, and false, if one
/// had better come after the other.
template <class T, class Rows, class Terms, std::size_t Inputs>
[[nodiscard]] bool map_and_sum_rows(Terms const& terms_of, std::array<tensor_view<T const>, Inputs> const& in,
                                    tensor_view<T> const& out, stores how, Rows rows, std::int64_t length,
                                    sums_of_channels<Rows::sum_count> const& sums, processor const& on) {
  using map_type = elementwise_map<T, linear_op<Inputs>>;
  groups const parts{out};
  pipeline_reading const reading{Inputs, Inputs > 1 ? map_fetches::next_sums : map_fetches::nothing};
  bool const interleaves = suits_turns_of_vectors<T>(parts, reading, on) &&
                           can_interleave<T>(in, std::array{out}, nullptr, how, parts.cut, on.interleaves_lines());
  row_pipeline<T, Rows, map_type, groups> const pipeline{in[0], parts, reading, interleaves, 1, on};
  if (!pipeline.maps_later()) return false;
  scratch_lease<accumulate_t<T>> table{map_type::table_size(out)};
  map_type const map{{}, terms_of, in, {out}, nullptr, how, table.data()};
  group_sums<Rows> of_groups;
  pipeline(rows, 0, length, of_groups.data(), &map, out.channels);
  merge_groups(parts, length, of_groups.data(), &Rows::merge, sums);
  if (length < out.channels) map(boxes::box{length, out.channels - length, 0, out.samples, 0, out.spatial});
  stream_fence();
  return true;
}

/// For each block of channels: its `sums` by `make_rows(first, length)`, `finish(first, length)`, and
/// `make_map(first, length, table)`, by a `row_pipeline`. `x` and `parts` are those of all, `reading` and `on` as of the pipeline.
/// Each thread takes several blocks in a row, or its share of them.
template <class T, class Parts, class MakeRows, class MakeMap,
          class Rows = std::invoke_result_t<MakeRows const&, std::int64_t, std::int64_t>>
void reduce_and_map_rows(executor_ref exec, channel_blocks const& blocks, tensor_view<T const> const& x,
                         Parts const& parts, pipeline_reading const& reading, MakeRows const& make_rows,
                         sums_of_channels<Rows::sum_count> const& sums,
                         function_ref<void(std::int64_t, std::int64_t)> finish, MakeMap const& make_map,
                         processor const& on = processor::here()) {
  using A = accumulate_t<T>;
  using map_type = std::invoke_result_t<MakeMap const&, std::int64_t, std::int64_t, A*>;
  using shares_type = std::bitset<static_cast<std::size_t>(block_team::most_shares)>;
  bool interleaves = false;
  if constexpr (std::is_same_v<Parts, groups>)
    interleaves =
        suits_turns_of_vectors<T>(parts, reading, on) && make_map.can_interleave(parts.cut, on.interleaves_lines());
  std::int64_t const shares = shares_of_block(x, blocks.length, reading.summed, exec.concurrency(), interleaves, on);
  row_pipeline<T, Rows, map_type, Parts> const pipeline{
      x.channel_range(0, blocks.length), parts, reading, interleaves, shares, on};
  std::int64_t const longest = blocks.size(blocks.count - 1),
                     sums_of_block = static_cast<std::int64_t>(Rows::sum_count) * parts.count * longest;
  block_teams teams{exec, blocks.count, shares};
  scratch_lease<double> shared_sums{shares == 1 ? 0 : teams.count() * sums_of_block};
  teams.for_each([&](block_team& team, std::int64_t run, std::int64_t begin, std::int64_t end, std::int64_t own) {
    scratch_lease<A> table{map_type::table_size(x.channel_range(0, longest))};
    group_sums<Rows> own_sums;
    double* const of_groups = shares == 1 ? own_sums.data() : shared_sums.data() + run * sums_of_block;
    std::optional<map_type> map;
    std::int64_t mapped = 0; // channels
    auto const map_shares = [&](shares_type const& those, std::int64_t but = -1) {
      for (std::int64_t share = 0; share < shares; ++share)
        if (those[static_cast<std::size_t>(share)] && share != but) pipeline.map_share(*map, share, mapped);
    };
    shares_type held; // shares that this thread has
    bool fetched = false;
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t const first = blocks.first(i), length = blocks.size(i);
      bool const comes = team.claim(i, own);
      auto const before = std::exchange(held, {});
      map_shares(before, comes ? own : -1);
      if (!comes && team.is_complete(i)) continue;
      auto rows = make_rows(first, length);
      auto const sum = [&](std::int64_t share, map_type const* meanwhile) {
        pipeline(rows, share, length, of_groups, meanwhile, mapped, fetched);
        held.set(static_cast<std::size_t>(share));
        if (!team.add_share()) return;
        merge_groups(parts, length, of_groups, &Rows::merge, from_channel(sums, first));
        finish(first, length);
        team.complete(i);
      };
      if (comes) sum(own, before[static_cast<std::size_t>(own)] ? &*map : nullptr);
      if (!team.wait_for(i, [&](std::int64_t share) { sum(share, nullptr); })) return;
      if (held.none()) continue;
      map.emplace(make_map(first, length, table.data()));
      mapped = length;
      if (pipeline.maps_later()) continue;
      auto const next = next_block::of(x.channel_range(first, length), reading.summed, i + 1 == end ? 0 : length, on);
      pipeline.map_block(*map, length, next);
      fetched = next.channels_ahead != 0;
      held.reset();
    }
    map_shares(held);
    stream_fence();
  });
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
