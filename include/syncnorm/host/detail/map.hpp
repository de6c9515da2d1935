#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/coefficient_table.hpp>
#include <syncnorm/host/detail/coefficients_of.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

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

/// Elementwise `out… = op(in…, coefficients of the channel, lanes that count)`. Outputs without data are left out. `Op` has
///
///     static constexpr std::size_t inputs, outputs, coefficients;
///     static constexpr bool takes_mask;        else all lanes count
///     std::array<V, outputs> apply(std::array<V, inputs>, std::array<V, coefficients>, lanes)
template <class T, class Op>
class elementwise_map {
  using A = accumulate_t<T>;
  static constexpr int L = native_lanes<A>;
  static constexpr std::size_t outputs = Op::outputs, coefficients = Op::coefficients;
  using pointers = std::array<T const*, Op::inputs>;
  using targets = std::array<T*, outputs>;
  using vector = vector_t<A, L>;
  using results = std::array<vector, outputs>;
  static constexpr std::int64_t page_elements = 4096 / static_cast<std::int64_t>(sizeof(T));

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
      : op_{op}, in_{in}, out_{out}, mask_{mask}, table_{table} {
    if (mask == nullptr && all([](auto const& x) { return table_folds(x); })) {
      fold_ = in_[0].spatial;
      for (auto& x : out_) x = folded(x);
      for (auto& x : in_) x = folded(x);
    }
    layout_ = std::apply([](auto const&... x) { return common_layout(x...); }, std::tuple_cat(in_, out_));
    if (how == stores::automatic) how = stores_for(in[0]);
    for (std::size_t j = 0; j < outputs; ++j) {
      // In place, the lines to be written are in the cache already.
      bool const in_place = std::ranges::any_of(in, [&](auto const& x) { return x.data == out[j].data; });
      streams_[j] = out[j].data != nullptr && how == stores::streaming && can_stream<T> && !in_place &&
                    layout_ != layout::strided;
    }
    bool const streams = std::ranges::find(streams_, true) != streams_.end(), foreseen = processor::here().foresees;
    dense_ = mask == nullptr && layout_ == layout::rows && in_[0].spatial >= line_elements<T> &&
             all([](auto const& x) { return x.stride_c == x.spatial; });
    reads_ahead_ = streams && (layout_ == layout::channels
                                   ? fold_ == 1 // what is folded is in the cache
                                   : dense_ && !foreseen && (inputs == 1 || in_[0].spatial < page_elements));
    // Few channels without a gap to the next position: a run takes several positions. From memory, a kilobyte or two of each
    // coefficient stay in the cache even where what is read is fetched there.
    std::int64_t const channels = in_[0].channels;
    if (mask == nullptr && layout_ == layout::channels && all([](auto const& x) { return x.stride_s == x.channels; }))
      run_positions_ = positions_of_run(in_[0], streams && !foreseen ? page_elements / 4 : chunk_channels<A>);
    std::int64_t const period = channels * run_positions_;
    step_ = coefficient_step<A>(period);
    fill_coefficients<coefficients>(table, terms, channels, fold_, period);
  }

  [[nodiscard]] boxes tasks() const { return boxes_of_map<A>(in_[0], layout_, fold_ != 1); }

  /// Computes one box. Meanwhile fetches the inputs `channels_ahead` further, or, where that is 0, what follows if that is worth it.
  /// `stream_fence` must follow.
  [[gnu::noinline]] void operator()(boxes::box const& box, std::int64_t channels_ahead = 0) const {
    if (layout_ == layout::strided) return elements(box);
    for_its_kind([&]<bool Masked>(std::bool_constant<Masked>) {
      layout_ == layout::rows ? rows<Masked>(box, channels_ahead) : lanes<Masked>(box, channels_ahead);
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

private:
  /// For each output.
  using per_output = std::array<bool, outputs>;

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
  using seam = seam_coefficients<T, coefficients>;

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

  using distances = std::array<std::int64_t, inputs>;

  [[nodiscard]] distances further(row_distance const& by) const {
    distances each;
    for (std::size_t j = 0; j < inputs; ++j)
      each[j] = by.channels * in_[j].stride_c + by.samples * in_[j].stride_n + by.positions;
    return each;
  }

  template <class K>
  [[nodiscard, gnu::always_inline]] static results compute(Op const& op, pointers const& in, std::int64_t i,
                                                           K const& k) {
    std::array<vector, inputs> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) v[j] = load<L>(in[j] + i);
    return op.apply(v, k.get(i), k.counted(i));
  }

  /// Calls write(j, whether it is streamed) of each output that is needed.
  template <class Write>
  [[gnu::always_inline]] static void for_each_output(targets const& out, per_output const& streams,
                                                     Write const& write) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < outputs; ++j)
      if (streams[j])
        write(j, std::true_type{});
      else if (outputs == 1 || out[j] != nullptr)
        write(j, std::false_type{});
  }

  [[gnu::always_inline]] static void put(targets const& out, std::int64_t i, results const& v,
                                         per_output const& streams) {
    for_each_output(out, streams, [&]<bool Stream>(std::size_t j, std::bool_constant<Stream>) {
      if constexpr (Stream)
        stream<L>(out[j] + i, v[j]);
      else
        store<L>(out[j] + i, v[j]);
    });
  }

  /// Computes and writes two vectors, of one channel in whatever order is the quickest.
  template <class K>
  [[gnu::always_inline]] static void put_two(Op const& op, pointers const& in, targets const& out, std::int64_t i,
                                             K const& k, per_output const& streams) {
    if constexpr (requires { k.counted_of_pair(i); }) {
      std::array<vector, inputs> v0, v1;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) {
        auto const pair = load_pair<L>(in[j] + i);
        v0[j] = pair[0];
        v1[j] = pair[1];
      }
      auto const counted = k.counted_of_pair(i);
      auto const out0 = op.apply(v0, k.get(i), counted[0]), out1 = op.apply(v1, k.get(i), counted[1]);
      for_each_output(out, streams, [&]<bool Stream>(std::size_t j, std::bool_constant<Stream>) {
        if constexpr (Stream)
          stream_pair<L>(out[j] + i, {out0[j], out1[j]});
        else
          store_pair<L>(out[j] + i, {out0[j], out1[j]});
      });
    } else {
      auto const out0 = compute(op, in, i, k), out1 = compute(op, in, i + L, k);
      for_each_output(out, streams, [&]<bool Stream>(std::size_t j, std::bool_constant<Stream>) {
        if constexpr (Stream)
          stream_two<L>(out[j] + i, out0[j], out1[j]);
        else
          store_two<L>(out[j] + i, out0[j], out1[j]);
      });
    }
  }

  /// Elements [begin, end) of `n`, fewer than a vector's; a vector's are there.
  template <class K>
  [[gnu::noinline]] void some(pointers const& in, targets const& out, std::int64_t begin, std::int64_t end,
                              std::int64_t n, K const& k) const {
    std::int64_t const at = std::min(begin, n - L);
    auto const v = compute(op_, in, at, k);
    for_each_output(out, streams_, [&]<bool Stream>(std::size_t j, std::bool_constant<Stream>) {
      put_lanes<Stream, L>(out[j] + at, v[j], begin - at, end - at);
    });
  }

  /// A row of `count` elements, fewer than a vector's, with the bits that a vector gives: where multiplications and additions
  /// are contracted, single numbers may be rounded otherwise.
  template <class K>
  [[gnu::noinline]] void short_row(pointers const& in, targets const& out, std::int64_t count, K const& k) const {
    auto const bytes = static_cast<std::size_t>(count) * sizeof(T);
    std::array<T, static_cast<std::size_t>(L)> elements{};
    std::array<vector, inputs> v;
    for (std::size_t j = 0; j < inputs; ++j) {
      std::memcpy(static_cast<void*>(elements.data()), in[j], bytes);
      v[j] = load<L>(elements.data());
    }
    auto const result = op_.apply(v, k.get(0), k.first_counted(count));
    for (std::size_t j = 0; j < outputs; ++j) {
      if (out[j] == nullptr) continue;
      store<L>(elements.data(), result[j]);
      std::memcpy(static_cast<void*>(out[j]), elements.data(), bytes);
    }
  }

  /// Contiguous channels, or positions that are taken for channels.
  template <bool Masked>
  void lanes(boxes::box const& box, std::int64_t channels_ahead) const {
    distances far;
    far.fill(fold_ == 1 ? elements_ahead<T>(inputs) : channels_ahead * fold_);
    bool const fetch = fold_ == 1 ? reads_ahead_ : channels_ahead != 0;
    std::int64_t const end = box.position + box.positions;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n) {
      std::uint8_t const* const mask = Masked ? mask_->row(n) : nullptr;
      for (std::int64_t s = box.position; s < end; s += run_positions_) {
        std::int64_t const length = box.channels * std::min(run_positions_, end - s);
        per_channel<Masked> const k{table_ + box.channel, step_, !Masked || mask[s] != 0 ? A{1} : A{0}};
        run(from(n, box.channel, s), to(n, box.channel, s), length, k, far, fetch, 0, length);
      }
    }
  }

  /// Whatever is contiguous nowhere, one element at a time.
  void elements(boxes::box const& box) const {
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n) {
      std::uint8_t const* const mask = mask_ == nullptr ? nullptr : mask_->row(n);
      for (std::int64_t c = box.channel; c < box.channel + box.channels; ++c) {
        std::array<A, coefficients> k;
        for (std::size_t j = 0; j < coefficients; ++j) k[j] = table_[static_cast<std::int64_t>(j) * step_ + c];
        for (std::int64_t s = box.position; s < box.position + box.positions; ++s) {
          std::array<A, inputs> v;
          for (std::size_t j = 0; j < inputs; ++j) v[j] = load<1>(&in_[j](n, c, s));
          auto const result = op_.apply(v, k, mask == nullptr || mask[s] != 0);
          for (std::size_t j = 0; j < outputs; ++j)
            if (out_[j].data != nullptr) store<1>(&out_[j](n, c, s), result[j]);
        }
      }
    }
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
        row<Masked>({n, c, box.position, end, whole && c != first, whole && c != last}, in, out, ahead, fetch);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < inputs; ++j) in[j] += in_[j].stride_c;
#pragma GCC unroll 8
        for (std::size_t j = 0; j < outputs; ++j)
          if (outputs == 1 || out[j] != nullptr) out[j] += out_[j].stride_c;
      }
    }
  }

  /// Elements from the line of the cache that all outputs begin before `out`, or there; negative where not all are streamed there.
  [[nodiscard, gnu::always_inline]] std::int64_t since_line(targets const& out) const {
    std::int64_t since = -1;
    for (std::size_t j = 0; j < outputs; ++j) {
      if (outputs > 1 && out[j] == nullptr) continue;
      std::int64_t const its = elements_since_line(out[j]);
      if (!streams_[j] || (since >= 0 && since != its)) return -1;
      since = its;
    }
    return since;
  }

  /// A piece of a row. Streams the lines of the cache that end in it: what is before the piece in the first of them is computed once
  /// more, and what is left in the last comes with the next piece. A line that is written in two parts takes several times as long.
  template <bool Masked>
  [[gnu::always_inline]] void row(row_piece const& piece, pointers const& in, targets const& out,
                                  distances const& further, bool fetch) const {
    auto const [sample, channel, begin, end, follows, is_followed] = piece;
    constant<Masked> const k{table_ + channel, step_, Masked ? mask_->row(sample) + begin : nullptr};
    std::int64_t first = 0, last = end - begin;
    if (std::int64_t const before = since_line(out); before >= 0) {
      if (before != 0 && follows && (begin != 0 || dense_)) {
        if (begin != 0)
          line(in, out, -before, k);
        else if constexpr (!Masked)
          line(in, out, -before, seam{{table_ + channel - 1, step_, nullptr}, k});
        first = line_elements<T> - before;
      }
      if (is_followed && (end != in_[0].spatial || dense_)) last -= (before + last) % line_elements<T>;
    }
    run(in, out, end - begin, k, further, fetch, first, last);
  }

  /// Streams the line of the cache that begins at element `i`.
  template <class K>
  [[gnu::noinline]] void line(pointers const& in, targets const& out, std::int64_t i, K const& k) const {
    auto const op = op_;
    for (std::int64_t const end = i + line_elements<T>; i < end; i += stream_lanes<T>) {
      auto const v0 = compute(op, in, i, k);
      auto const v1 = stream_lanes<T> == L ? v0 : compute(op, in, i + L, k);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < outputs; ++j) {
        if (outputs > 1 && out[j] == nullptr) continue;
        if constexpr (stream_lanes<T> == L)
          stream<L>(out[j] + i, v0[j]);
        else
          stream_two<L>(out[j] + i, v0[j], v1[j]);
      }
    }
  }

  /// `n` contiguous elements, or, where they are streamed, [first, last) of these, which both are 0, `n`, or where a line begins.
  /// `fetch`: those `further` on, for the second-level cache.
  template <class K>
  [[gnu::noinline]] void run(pointers const& in, targets const& out, std::int64_t n, K const& k,
                             distances const& further, bool fetch, std::int64_t first, std::int64_t last) const {
    if (n < L) return short_row(in, out, n, k);
    // Vectors are aligned for the first output that is streamed, and others are streamed where they then are, too.
    std::size_t leader = 0;
    while (leader < outputs && !streams_[leader]) ++leader;
    per_output aligned{};
    std::int64_t i = first;
    results overlapping{};
    if (leader < outputs) {
      std::int64_t const off = elements_since_vector(out[leader] + first);
      for (std::size_t j = 0; j < outputs; ++j)
        aligned[j] = streams_[j] && elements_since_vector(out[j] + first) == off;
      std::int64_t const head = off == 0 ? first : std::min<std::int64_t>(n, stream_lanes<T> - off);
      for (; i + L <= head; i += L) put(out, i, compute(op_, in, i, k), per_output{});
      if (i < head) some(in, out, i, head, n, k);
      i = head;
    } else {
      // The last vector may overlap the one before it, which in place overwrites what it reads.
      overlapping = compute(op_, in, n - L, k);
    }
    i = vectors(in, out, i, last, k, further, fetch, aligned);
    if (i >= last) return;
    if (leader < outputs)
      some(in, out, i, n, n, k);
    else
      put(out, n - L, overlapping, per_output{});
  }

  /// All whole vectors from `i` on; returns where they end. What it takes are copies, which stay in registers: of anything else the
  /// compiler must suppose that an element that is written changes it.
  template <class K>
  [[nodiscard, gnu::always_inline]] std::int64_t vectors(pointers in, targets out, std::int64_t i, std::int64_t n, K k,
                                                         distances further, bool fetch, per_output streams) const {
    auto const op = op_;
    auto const ask = [&](std::int64_t at) __attribute__((always_inline)) {
      if (!fetch) return;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) prefetch<2 * L, 2>(in[j], at + further[j]);
    };
    for (; i + 4 * L <= n; i += 4 * L) {
      ask(i);
      put_two(op, in, out, i, k, streams);
      ask(i + 2 * L);
      put_two(op, in, out, i + 2 * L, k, streams);
    }
    if (i < n) ask(i);
    if (i + 2 * L < n) ask(i + 2 * L);
    if (i + 2 * L <= n) {
      put_two(op, in, out, i, k, streams);
      i += 2 * L;
    }
    // Half a line that is streamed by itself takes several times as long.
    if (i + L <= n) {
      put(out, i, compute(op, in, i, k), stream_lanes<T> == L ? streams : per_output{});
      i += L;
    }
    return i;
  }

  Op op_;
  views in_;
  out_views out_;
  prepared_mask const* mask_;
  /// Coefficient j of channel c at j·step + c; of several positions one after the other.
  A const* table_;
  std::int64_t step_ = 0, run_positions_ = 1;
  per_output streams_{};
  layout layout_ = layout::strided;
  std::int64_t fold_ = 1; ///< positions of a channel that are taken for channels
  /// No mask, and the rows of a sample follow each other without a gap, and are no shorter than a line of the cache.
  bool dense_ = false;
  bool reads_ahead_ = false; ///< whether what follows is fetched
};

/// Maps all of `in` to `out`, with the coefficients `terms(channel)`. `fetch`: the block of channels that is mapped next.
template <class T, class Op, class Terms>
void map_elements(executor_ref exec, Op const& op, Terms const& terms, typename elementwise_map<T, Op>::views const& in,
                  typename elementwise_map<T, Op>::out_views const& out, prepared_mask const* mask, stores how,
                  next_block fetch = {}) {
  if (in[0].size() == 0) return;
  scratch_lease<accumulate_t<T>> table{elementwise_map<T, Op>::table_size(in[0])};
  elementwise_map<T, Op> const map{op, terms, in, out, mask, how, table.data()};
  map_boxes(exec, map, fetch.channels_ahead);
}

/// Makes the map of channels [first, first + length), with the coefficients of `make(first, length)`, for `reduce_and_map`.
template <class T, class Op, class Make>
[[nodiscard]] auto map_of_channels(Op const& op, typename elementwise_map<T, Op>::views const& in,
                                   typename elementwise_map<T, Op>::out_views const& out, prepared_mask const* mask,
                                   stores how, Make const& make) {
  return [=](std::int64_t first, std::int64_t length, accumulate_t<T>* table) {
    auto part = in;
    for (auto& view : part) view = view.channel_range(first, length);
    auto part_out = out;
    for (auto& view : part_out) view = view.channel_range(first, length);
    return elementwise_map<T, Op>{op, make(first, length), part, part_out, mask, how, table};
  };
}

} // namespace syncnorm::host::detail
