#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/coefficient_table.hpp>
#include <syncnorm/host/detail/coefficients_of.hpp>
#include <syncnorm/host/detail/elementwise_run.hpp>
#include <syncnorm/host/detail/lane_runs.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/detail/strided_rows.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// From one row to another, and to another position.
struct row_distance {
  std::int64_t channels, samples, positions;
};

/// Positions [begin, end) of a channel, and whether the same thread maps what is before and after them in this row, or in those of
/// the channels before and after, in pieces of at least a line of the cache.
struct row_piece {
  std::int64_t sample, channel, begin, end;
  bool follows, is_followed;
};

/// Part `part` of a row of channel `c` of so many, all parts of whose rows are mapped.
template <class T>
[[nodiscard]] row_piece part_of_row(row_cut const& cut, std::int64_t sample, std::int64_t c, std::int64_t channels,
                                    std::int64_t part) {
  std::int64_t const begin = cut.begin(part), end = begin + cut.size(part);
  bool const begins_row = part == 0, ends_row = part + 1 == cut.pieces;
  // In a piece of less than a line of the cache, none may end that begins before it.
  bool const follows = begins_row ? c > 0 : end - begin >= line_elements<T>;
  bool const is_followed = ends_row ? c + 1 < channels : cut.size(part + 1) >= line_elements<T>;
  return {sample, c, begin, end, follows, is_followed};
}

/// Which outputs a map streams if it is to: not those in place, whose lines are in the cache already.
template <class T, std::size_t Inputs, std::size_t Outputs>
[[nodiscard]] std::array<bool, Outputs> streamed_outputs(std::array<tensor_view<T const>, Inputs> const& in,
                                                         std::array<tensor_view<T>, Outputs> const& out, stores how) {
  std::array<bool, Outputs> streamed{}; // which g++ 12 cannot see that the algorithm fills
  std::ranges::transform(out, streamed.begin(), [&](auto const& y) {
    bool const in_place = std::ranges::any_of(in, [&](auto const& x) { return x.data == y.data; });
    return y.data != nullptr && how == stores::streaming && can_stream<T> && !in_place;
  });
  return streamed;
}

/// Whether no line of the cache has parts of two pieces of contiguous rows.
template <class T, std::size_t Outputs>
[[nodiscard]] bool are_in_lines(std::array<tensor_view<T>, Outputs> const& out, row_cut const& cut) {
  auto const in_lines = [](std::int64_t elements) { return elements % line_elements<T> == 0; };
  return in_lines(cut.length) && in_lines(cut.spatial) && std::ranges::all_of(out, [&](auto const& y) {
           return elements_since_line(y.data) == 0 && in_lines(y.stride_c) && in_lines(y.stride_n);
         });
}

/// Whether pieces of contiguous rows can be mapped between the vectors of another loop: where all outputs are streamed, and lines of the
/// cache begin at the same places of each. `lines`: only where pieces `are_in_lines`.
template <class T, std::size_t Inputs, std::size_t Outputs>
[[nodiscard]] bool can_interleave(std::array<tensor_view<T const>, Inputs> const& in,
                                  std::array<tensor_view<T>, Outputs> const& out, prepared_mask const* mask, stores how,
                                  row_cut const& cut, bool lines) {
  auto const lines_between = [](std::int64_t a, std::int64_t b) { return (a - b) % line_elements<T> == 0; };
  auto const is_alike = [&](auto const& y) {
    return elements_since_line(y.data) == elements_since_line(out[0].data) &&
           lines_between(y.stride_c, out[0].stride_c) && lines_between(y.stride_n, out[0].stride_n);
  };
  bool const no_short_piece = cut.pieces != 0 && cut.size(cut.pieces - 1) >= row_cut::unit;
  return mask == nullptr && std::ranges::all_of(streamed_outputs<T>(in, out, how), std::identity{}) &&
         (are_in_lines(out, cut) || (!lines && no_short_piece && std::ranges::all_of(out, is_alike)));
}

/// Elementwise `out… = op(in…, coefficients of the channel, lanes that count)`. Outputs without data are left out. `Op` has
///
///     static constexpr std::size_t inputs, outputs, coefficients;
///     static constexpr bool takes_mask;        else all lanes count
///     std::array<V, outputs> apply(std::array<V, inputs>, std::array<V, coefficients>, lanes)
template <class T, class Op>
class elementwise_map {
  using A = accumulate_t<T>;
  static constexpr std::size_t outputs = Op::outputs, coefficients = Op::coefficients;
  using run_type = elementwise_run<T, Op>;
  using pointers = typename run_type::pointers;
  using targets = typename run_type::targets;
  using distances = typename run_type::distances;
  using per_output = typename run_type::per_output;

public:
  static constexpr std::size_t inputs = Op::inputs;
  using views = std::array<tensor_view<T const>, inputs>;
  using out_views = std::array<tensor_view<T>, outputs>;

  /// Numbers of type `A` that the coefficients for tensors like `x` take.
  template <class X>
  static constexpr std::int64_t table_size(tensor_view<X> const& x) {
    return coefficient_table_size<A>(x, coefficients);
  }

  /// `terms(channel)`: the coefficients; `mask`: null where all positions count.
  template <class Terms>
  elementwise_map(Op const& op, Terms const& terms, views const& in, out_views const& out, prepared_mask const* mask,
                  stores how, A* table)
      : run_{op, {}}, in_{in}, out_{out}, mask_{mask}, table_{table} {
    if (all([](auto const& x) { return table_folds(x); })) {
      fold_ = in_[0].spatial;
      for (auto& x : out_) x = folded(x);
      for (auto& x : in_) x = folded(x);
    }
    layout_ = std::apply([](auto const&... x) { return common_layout(x...); }, std::tuple_cat(in_, out_));
    if (layout_ == layout::channels) {
      if (mask == nullptr)
        make_one_sample(in_, out_);
      else if (fold_ == 1 && mask->rows_follow())
        join_samples_in_order(in_, out_);
    }
    if (how == stores::automatic) how = stores_for(in[0]);
    auto const streamed = layout_ == layout::strided ? per_output{} : streamed_outputs<T>(in, out, how);
    run_ = run_type{op, streamed};
    auto const& on = processor::here();
    bool const streams = std::ranges::find(streamed, true) != streamed.end();
    finds_pages_ = streams && on.finds_pages_ahead();
    dense_ = layout_ == layout::rows && in_[0].spatial >= line_elements<T> &&
             all([](auto const& x) { return x.stride_c == x.spatial; });
    bool const fetches =
        fold_ != 1 || on.fetches_streams(inputs, static_cast<std::int64_t>(inputs * sizeof(T)) * in_[0].size());
    reads_ahead_ = streams && dense_ && mask == nullptr && !on.foresees &&
                   (inputs == 1 || in_[0].spatial < page_elements<T> / (fetches ? 1 : 2));
    bool const follow = layout_ == layout::channels && all([](auto const& x) { return x.stride_s == x.channels; });
    runs_ = {in_[0],
             {fold_ != 1, follow, streams, run_.since_line(to(0, 0, 0)) <= 0, mask != nullptr, on.foresees, fetches}};
    step_ = coefficient_step<A>(runs_.period());
    fill_coefficients<coefficients>(table, terms, in_[0].channels, fold_, runs_.period());
  }

  [[nodiscard]] boxes tasks() const { return boxes_of_map<A>(in_[0], layout_, runs_.narrow_boxes()); }

  /// Computes one box. Meanwhile fetches the inputs `channels_ahead` further, or, where that is 0, what follows if that is worth it.
  /// `stream_fence` must follow.
  [[gnu::noinline]] void operator()(boxes::box const& box, std::int64_t channels_ahead = 0) const {
    for_its_kind([&]<bool Masked>(std::bool_constant<Masked>) {
      switch (layout_) {
      case layout::rows:
        return rows<Masked>(box, channels_ahead);
      case layout::channels:
        return lanes<Masked>(box, channels_ahead);
      case layout::strided:
        return strided<Masked>(box);
      }
    });
  }

  /// Computes a piece, where rows are contiguous, and meanwhile fetches the inputs at a distance, if any. `stream_fence` must
  /// follow.
  void operator()(row_piece const& piece, std::optional<row_distance> const& to_fetch) const {
    for_its_kind([&]<bool Masked>(std::bool_constant<Masked>) {
      row<Masked>(piece, from(piece.sample, piece.channel, piece.begin), to(piece.sample, piece.channel, piece.begin),
                  further(to_fetch.value_or(row_distance{})), to_fetch.has_value());
    });
  }

  /// The whole lines of the cache of pieces of channel `c`, where they `can_interleave`, which the caller has to compute. `stream_fence`
  /// must follow.
  [[nodiscard, gnu::always_inline]] auto interleaved(std::int64_t c) const {
    using coefficients_type = constant<false>;
    std::array<std::int64_t, outputs> out_rows;
    for (std::size_t j = 0; j < outputs; ++j) out_rows[j] = out_[j].stride_n;
    return typename run_type::template interleaved<coefficients_type>{
        run_.op(),   from(0, c, 0), further({0, 1, 0}),
        to(0, c, 0), out_rows,      coefficients_type{table_ + c, step_, nullptr}};
  }
  /// Whether these leave nothing.
  [[nodiscard]] bool are_in_lines(row_cut const& cut) const { return detail::are_in_lines(out_, cut); }
  /// Computes what they leave of a piece.
  [[gnu::noinline]] void ends(row_piece const& piece) const {
    pointers const in = from(piece.sample, piece.channel, piece.begin);
    targets const out = to(piece.sample, piece.channel, piece.begin);
    constant<false> const k{table_ + piece.channel, step_, nullptr};
    std::int64_t const n = piece.end - piece.begin;
    auto const [first, last] = run_type::whole_lines(out[0], n);
    if (first != 0) {
      if (std::int64_t const before = line_elements<T> - first; takes_line<false>(piece, before))
        first_line<false>(piece, in, out, before, k, nullptr);
      else
        run_(in, out, n, k, {}, false, 0, first);
    }
    if (last != n && !leaves_line<false>(piece, n - last)) run_(in, out, n, k, {}, false, last, n);
  }

private:
  /// Calls f for maps with a mask, or without.
  template <class F>
  void for_its_kind(F const& f) const {
    if constexpr (Op::takes_mask)
      if (mask_ != nullptr) return f(std::true_type{});
    f(std::false_type{});
  }

  template <bool Masked>
  using constant = channel_coefficients<T, coefficients, Masked>;
  template <bool Masked>
  using per_channel = lane_coefficients<T, coefficients, Masked>;
  template <bool Masked>
  using seam = seam_coefficients<T, coefficients, Masked>;

  template <class Holds>
  [[nodiscard]] bool all(Holds const& holds) const {
    return std::ranges::all_of(in_, holds) && std::ranges::all_of(out_, holds);
  }

  [[nodiscard, gnu::always_inline]] pointers from(std::int64_t n, std::int64_t c, std::int64_t s) const {
    pointers each;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) each[j] = &in_[j](n, c, s);
    return each;
  }

  [[nodiscard, gnu::always_inline]] targets to(std::int64_t n, std::int64_t c, std::int64_t s) const {
    targets each;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < outputs; ++j)
      each[j] = outputs > 1 && out_[j].data == nullptr ? nullptr : &out_[j](n, c, s);
    return each;
  }

  [[nodiscard]] distances further(row_distance const& by) const {
    distances each;
    for (std::size_t j = 0; j < inputs; ++j)
      each[j] = by.channels * in_[j].stride_c + by.samples * in_[j].stride_n + by.positions;
    return each;
  }

  /// Contiguous channels, or positions that are taken for channels.
  template <bool Masked>
  void lanes(boxes::box const& box, std::int64_t channels_ahead) const {
    bool const next_block = fold_ != 1 && channels_ahead != 0, fetch = next_block || runs_.reads_ahead();
    std::int64_t const part = runs_.part_of(box.channels);
    distances far;
    for (std::size_t j = 0; j < inputs; ++j)
      far[j] = next_block            ? channels_ahead * fold_
               : part < box.channels ? elements_to_next(in_[j])
                                     : elements_ahead<T>(inputs);
    for (std::int64_t first = 0; first < box.channels; first += part)
      lanes<Masked>(box, first, std::min(box.channels, first + part), far, fetch);
  }

  /// Lanes [first, last) of each position.
  template <bool Masked>
  void lanes(boxes::box const& box, std::int64_t first, std::int64_t last, distances const& far, bool fetch) const {
    std::int64_t const channels = box.channels, end_of_box = box.position + box.positions;
    lane_counts<A, Masked> counts;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n)
      for (std::int64_t s = box.position; s < end_of_box; s += runs_.positions()) {
        targets out = to(n, box.channel, s);
        auto const [begin, end] = runs_(box, s, std::min(runs_.positions(), end_of_box - s), first, last,
                                        [&] { return run_.since_line(out); });
        std::int64_t const length = end - begin;
        if (length <= 0) continue;
        pointers const in = from(n, box.channel + begin, s);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < outputs; ++j)
          if (outputs == 1 || out[j] != nullptr) out[j] += begin;
        A const* const table = table_ + box.channel + begin;
        if (finds_pages_) find_lanes(in, out, length, far, fetch);
        auto const run = [&](auto const& k) { run_(in, out, length, k, far, fetch, 0, length); };
        if constexpr (Masked) {
          std::uint8_t const* const mask = mask_->row(n) + s;
          std::int64_t const counted = ceil_div(end, channels); // positions
          if (all_nonzero(mask, counted * fold_))
            run(per_channel<false>{table, step_, nullptr, 0});
          else if (fold_ != 1)
            run(per_channel<true>{table, step_, counts.of_rows(mask, fold_, (box.channel + begin) % fold_, length), 1});
          else if (counted == 1)
            run(per_channel<true>{table, step_, counts.of_one(mask), 0});
          else
            run(per_channel<true>{table, step_, counts.of_several(mask, counted, channels) + begin, 1});
        } else {
          run(per_channel<false>{table, step_, nullptr, 0});
        }
      }
  }

  /// Has the pages found of what follows a run: of the next sample where positions are taken for channels, else of what is a page further.
  [[gnu::always_inline]] void find_lanes(pointers const& in, targets const& out, std::int64_t length,
                                         distances const& further, bool fetch) const {
    bool const folds = fold_ != 1;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < outputs; ++j)
      if (outputs == 1 || out[j] != nullptr)
        find_pages(out[j], folds ? out_[j].stride_n : page_elements<T>, length, !folds);
    if (!fetch) return;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j)
      find_pages(in[j], further[j] + (folds ? in_[j].stride_n : page_elements<T>), length, !folds);
  }

  /// Positions and channels of what is contiguous nowhere that are copied at a time.
  static constexpr std::int64_t positions_at_once = 64, channels_at_once = 16;

  template <bool Masked>
  void strided(boxes::box const& box) const {
    std::int64_t const end = box.position + box.positions, last = box.channel + box.channels;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n)
      for (std::int64_t s = box.position; s < end; s += positions_at_once)
        for (std::int64_t c = box.channel; c < last; c += channels_at_once)
          strided<Masked>({n, s, std::min(positions_at_once, end - s)}, c, std::min(channels_at_once, last - c));
  }
  /// Copies, which are mapped, and copied to where they belong.
  template <bool Masked>
  void strided(groups::piece const& piece, std::int64_t first, std::int64_t channels) const {
    constexpr auto size = static_cast<std::size_t>(channels_at_once * positions_at_once);
    std::array<std::array<T, size>, inputs> from;
    std::array<std::array<T, size>, outputs> made;
    for (std::size_t j = 0; j < inputs; ++j)
      copy_strided(in_[j], first, channels, piece, from[j].data(), positions_at_once);
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const row = static_cast<std::size_t>(c * positions_at_once);
      pointers in;
      targets out;
      for (std::size_t j = 0; j < inputs; ++j) in[j] = &from[j][row];
      for (std::size_t j = 0; j < outputs; ++j) out[j] = out_[j].data == nullptr ? nullptr : &made[j][row];
      std::uint8_t const* const mask = Masked ? mask_->row(piece.sample) + piece.begin : nullptr;
      run_(in, out, piece.length, constant<Masked>{table_ + first + c, step_, mask}, {}, false, 0, piece.length);
    }
    for (std::size_t j = 0; j < outputs; ++j)
      if (out_[j].data != nullptr) put_strided(out_[j], first, channels, piece, made[j].data(), positions_at_once);
  }

  template <bool Masked>
  void rows(boxes::box const& box, std::int64_t channels_ahead) const {
    distances ahead = further({channels_ahead, 0, 0});
    if (channels_ahead == 0) ahead.fill(elements_ahead<T>(inputs));
    bool const whole = box.positions == in_[0].spatial, fetch = channels_ahead != 0 || reads_ahead_;
    std::int64_t const first = box.channel, last = first + box.channels - 1, end = box.position + box.positions;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n) {
      pointers in = from(n, first, box.position);
      targets out = to(n, first, box.position);
      for (std::int64_t c = first; c <= last; ++c) {
        if (finds_pages_ && (c != last || n + 1 < box.sample + box.samples))
          find_row(in, out, end - box.position, c != last ? row_distance{1, 0, 0} : row_distance{first - last, 1, 0},
                   ahead, fetch);
        row<Masked>({n, c, box.position, end, whole && c != first, whole && c != last}, in, out, ahead, fetch);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < inputs; ++j) in[j] += in_[j].stride_c;
#pragma GCC unroll 8
        for (std::size_t j = 0; j < outputs; ++j)
          if (outputs == 1 || out[j] != nullptr) out[j] += out_[j].stride_c;
      }
    }
  }

  /// Has the pages of the row `by` further found: of what is written there, and of what is fetched `further`.
  [[gnu::always_inline]] void find_row(pointers const& in, targets const& out, std::int64_t length,
                                       row_distance const& by, distances const& further, bool fetch) const {
    auto const find = [&](auto const& x, T const* from, std::int64_t first) __attribute__((always_inline)) {
      std::int64_t const there = by.channels * x.stride_c + by.samples * x.stride_n;
      find_pages(from, first + there, length, by.samples == 0 && x.stride_c == length);
    };
#pragma GCC unroll 8
    for (std::size_t j = 0; j < outputs; ++j)
      if (outputs == 1 || out[j] != nullptr) find(out_[j], out[j], 0);
    if (!fetch) return;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) find(in_[j], in[j], further[j]);
  }

  /// Whether a line of the cache of which a row has `before` elements, and the next one the others, is streamed as a whole. With a mask
  /// half a line that is a vector by itself is written as fast.
  template <bool Masked>
  [[nodiscard, gnu::always_inline]] bool joins_rows(std::int64_t before) const {
    return dense_ && (!Masked || before % native_lanes<A> != 0);
  }

  /// Whether a piece is to begin with what is `before` it in its first line of the cache.
  template <bool Masked>
  [[nodiscard, gnu::always_inline]] bool takes_line(row_piece const& piece, std::int64_t before) const {
    return before != 0 && piece.follows && (piece.begin != 0 || joins_rows<Masked>(before));
  }
  /// Whether the `left` elements in its last line come with the next piece.
  template <bool Masked>
  [[nodiscard, gnu::always_inline]] bool leaves_line(row_piece const& piece, std::int64_t left) const {
    return piece.is_followed && (piece.end != in_[0].spatial || joins_rows<Masked>(left));
  }
  /// Streams the line in which a piece begins, `before` elements after that does.
  template <bool Masked>
  [[gnu::always_inline]] void first_line(row_piece const& piece, pointers const& in, targets const& out,
                                         std::int64_t before, constant<Masked> const& k,
                                         std::uint8_t const* mask) const {
    if (piece.begin != 0)
      run_.line(in, out, -before, k);
    else
      run_.line(in, out, -before, seam<Masked>{table_ + piece.channel - 1, step_, k, mask, in_[0].spatial});
  }

  /// A piece of a row. Streams the lines of the cache that end in it: what is before the piece in the first of them is computed once
  /// more, and what is left in the last comes with the next piece. A line that is written in two parts takes several times as long.
  template <bool Masked>
  [[gnu::always_inline]] void row(row_piece const& piece, pointers const& in, targets const& out,
                                  distances const& further, bool fetch) const {
    std::uint8_t const* const mask = Masked ? mask_->row(piece.sample) : nullptr;
    constant<Masked> const k{table_ + piece.channel, step_, Masked ? mask + piece.begin : nullptr};
    std::int64_t const n = piece.end - piece.begin;
    std::int64_t first = 0, last = n;
    if (std::int64_t const before = run_.since_line(out); before >= 0) {
      if (takes_line<Masked>(piece, before)) {
        first_line<Masked>(piece, in, out, before, k, mask);
        first = line_elements<T> - before;
      }
      std::int64_t const left = (before + n) % line_elements<T>;
      if (leaves_line<Masked>(piece, left)) last -= left;
    }
    run_(in, out, n, k, further, fetch, first, last);
  }

  run_type run_;
  views in_;
  out_views out_;
  prepared_mask const* mask_;
  /// Coefficient j of channel c at j·step + c; of several positions one after the other.
  A const* table_;
  std::int64_t step_ = 0;
  lane_runs<T> runs_;
  layout layout_ = layout::strided;
  std::int64_t fold_ = 1; ///< positions of a channel that are taken for channels
  /// The rows of a sample follow each other without a gap, and are no shorter than a line of the cache.
  bool dense_ = false;
  bool reads_ahead_ = false; ///< whether what follows is fetched, of rows
  bool finds_pages_ = false; ///< whether the pages of what follows are found, of a row while the one before is mapped
};

/// Makes the maps of channels [first, first + length), with the coefficients of `make(first, length)`, for `reduce_and_map`.
template <class T, class Op, class Make>
class maps_of_channels {
public:
  using map_type = elementwise_map<T, Op>;

  maps_of_channels(Op const& op, typename map_type::views const& in, typename map_type::out_views const& out,
                   prepared_mask const* mask, stores how, Make const& make)
      : op_{op}, in_{in}, out_{out}, mask_{mask}, how_{how}, make_{make} {}

  [[nodiscard]] map_type operator()(std::int64_t first, std::int64_t length, accumulate_t<T>* table) const {
    return {op_,  make_(first, length), channels_of(in_, first, length), channels_of(out_, first, length), mask_, how_,
            table};
  }

  [[nodiscard]] bool can_interleave(row_cut const& cut, bool lines) const {
    return detail::can_interleave<T>(in_, out_, mask_, how_, cut, lines);
  }

private:
  Op op_;
  typename map_type::views in_;
  typename map_type::out_views out_;
  prepared_mask const* mask_;
  stores how_;
  Make make_;
};

template <class T, class Op, class Make>
[[nodiscard]] auto map_of_channels(Op const& op, typename elementwise_map<T, Op>::views const& in,
                                   typename elementwise_map<T, Op>::out_views const& out, prepared_mask const* mask,
                                   stores how, Make const& make) {
  return maps_of_channels<T, Op, Make>{op, in, out, mask, how, make};
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
