#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

/// As linear_map, but `out… = op(in…, coefficients of the channel, lanes that count)`, with several outputs and a mask, which
/// are looked at as the kernel runs. Outputs without data are left out. `Op` has
///
///     static constexpr std::size_t inputs, outputs, coefficients;
///     std::array<A, coefficients> operator()(channel)        the coefficients
///     std::array<V, outputs> apply(std::array<V, inputs>, std::array<V, coefficients>, lanes)
template <class T, class Op>
class epilogue_map {
  using A = accumulate_t<T>;
  static constexpr std::size_t outputs = Op::outputs, coefficients = Op::coefficients;
  using pointers = std::array<T const*, Op::inputs>;
  using targets = std::array<T*, outputs>;
  template <int L>
  using results = std::array<vector_t<A, L>, outputs>;

public:
  static constexpr std::size_t inputs = Op::inputs;
  using views = std::array<tensor_view<T const>, inputs>;
  using out_views = std::array<tensor_view<T>, outputs>;

  /// Numbers of type `A` that the coefficients for tensors like `x` take.
  template <class X>
  static constexpr std::int64_t table_size(tensor_view<X> const& x) {
    return coefficient_table_size<A>(x, coefficients);
  }

  /// `mask`: null where all positions count.
  epilogue_map(Op const& op, views const& in, out_views const& out, prepared_mask const* mask, stores how, A* table)
      : op_{op}, in_{in}, out_{out}, mask_{mask}, table_{table} {
    std::int64_t fold = 1;
    if (mask == nullptr && all([](auto const& x) { return table_folds(x); })) {
      fold = in_[0].spatial;
      folded_ = true;
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
    dense_ = mask == nullptr && layout_ == layout::rows && in_[0].spatial >= line_elements<T> &&
             all([](auto const& x) { return x.stride_c == x.spatial; });
    // Few channels without a gap to the next position: a run takes several positions.
    std::int64_t const channels = in_[0].channels;
    if (mask == nullptr && layout_ == layout::channels && all([](auto const& x) { return x.stride_s == x.channels; }))
      run_positions_ = positions_of_run<A>(in_[0]);
    period_ = channels * run_positions_;
    fill_coefficients(table, op, channels, fold, period_);
  }

  [[nodiscard]] boxes tasks() const { return boxes_of_map<A>(in_[0], layout_, folded_); }

  /// Computes one box. Meanwhile fetches the inputs `channels_ahead` further, unless that is 0. `stream_fence` must follow.
  [[gnu::noinline]] void operator()(boxes::box const& box, std::int64_t channels_ahead = 0) const {
    std::array<std::int64_t, inputs> further{};
    for (std::size_t j = 0; j < inputs; ++j) further[j] = channels_ahead * in_[j].stride_c;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n) {
      std::uint8_t const* const mask = mask_ == nullptr ? nullptr : mask_->row(n);
      std::int64_t const begin = box.position, end = begin + box.positions;
      if (layout_ == layout::channels) {
        bool const fetch = !folded_ && std::ranges::find(streams_, true) != streams_.end(); // as linear_map
        std::array<std::int64_t, inputs> far;
        far.fill(elements_ahead<T>(inputs));
        for (std::int64_t s = begin; s < end; s += run_positions_) {
          std::int64_t const length = box.channels * std::min(run_positions_, end - s);
          run(from(n, box.channel, s), to(n, box.channel, s), length,
              per_channel{table_ + box.channel, period_, mask == nullptr || mask[s] != 0 ? A{1} : A{0}}, far, fetch, 0,
              length);
        }
        continue;
      }
      bool const whole = box.positions == in_[0].spatial;
      for (std::int64_t c = box.channel; c < box.channel + box.channels; ++c) {
        if (layout_ == layout::rows) {
          bool const first = c == box.channel, last = c + 1 == box.channel + box.channels;
          run_piece({n, c, begin, end, whole && !first, whole && !last}, further, channels_ahead != 0);
        } else {
          constant const k{table_ + c, period_, mask == nullptr ? nullptr : mask + begin};
          for (std::int64_t s = begin; s < end; ++s)
            put<1>(to(n, c, s), 0, compute<1>(from(n, c, s), 0, constant{k, s - begin}), {});
        }
      }
    }
  }

  /// As that of linear_map.
  void operator()(row_piece const& piece, std::optional<row_distance> const& to_fetch) const {
    auto const ahead = to_fetch.value_or(row_distance{});
    std::array<std::int64_t, inputs> further{};
    for (std::size_t j = 0; j < inputs; ++j)
      further[j] = ahead.channels * in_[j].stride_c + ahead.samples * in_[j].stride_n + ahead.positions;
    run_piece(piece, further, to_fetch.has_value());
  }

private:
  /// The coefficients of one channel, at consecutive positions.
  struct constant {
    static constexpr bool of_one_channel = true;
    std::array<A, coefficients> values;
    std::uint8_t const* mask;

    constant(A const* table, std::int64_t step, std::uint8_t const* of) : mask{of} {
      for (std::size_t j = 0; j < coefficients; ++j) values[j] = table[static_cast<std::int64_t>(j) * step];
    }
    constant(constant const& other, std::int64_t position) : constant{other} {
      if (mask != nullptr) mask += position;
    }
    template <int L>
    [[gnu::always_inline]] auto get(std::int64_t) const {
      std::array<vector_t<A, L>, coefficients> v;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < coefficients; ++j) v[j] = splat<A, L>(values[j]);
      return v;
    }
    template <int L>
    [[gnu::always_inline]] auto counted(std::int64_t i) const {
      return mask == nullptr ? all_lanes<A, L>() : counted_lanes<A, L>(mask + i);
    }
    /// Of the vectors of `load_pair`.
    template <int L>
    [[gnu::always_inline]] auto counted_of_pair(std::int64_t i) const {
      std::array both{all_lanes<A, L>(), all_lanes<A, L>()};
      if (mask != nullptr) both = counted_pair<T, L>(mask + i);
      return both;
    }
    /// Of the first `count` lanes; the mask may end there.
    template <int L>
    auto first_counted(std::int64_t count) const {
      std::array<std::uint8_t, static_cast<std::size_t>(L)> bytes{};
      if (mask == nullptr) return counted<L>(0);
      std::copy_n(mask, count, bytes.data());
      return counted_lanes<A, L>(bytes.data());
    }
  };

  /// The coefficients of consecutive channels, at one position or where all count.
  struct per_channel {
    static constexpr bool of_one_channel = false;
    A const* table;
    std::int64_t step;
    A counts; ///< 1 or 0

    template <int L>
    [[gnu::always_inline]] auto get(std::int64_t i) const {
      std::array<vector_t<A, L>, coefficients> v;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < coefficients; ++j) v[j] = load<L>(table + static_cast<std::int64_t>(j) * step + i);
      return v;
    }
    template <int L>
    [[gnu::always_inline]] auto counted(std::int64_t) const {
      return splat<A, L>(counts) > vector_t<A, L>{};
    }
    template <int L>
    auto first_counted(std::int64_t) const {
      return counted<L>(0);
    }
  };

  template <class Holds>
  [[nodiscard]] bool all(Holds const& holds) const {
    return std::ranges::all_of(in_, holds) && std::ranges::all_of(out_, holds);
  }

  [[nodiscard]] pointers from(std::int64_t n, std::int64_t c, std::int64_t s) const {
    pointers each;
    for (std::size_t j = 0; j < inputs; ++j) each[j] = &in_[j](n, c, s);
    return each;
  }

  [[nodiscard]] targets to(std::int64_t n, std::int64_t c, std::int64_t s) const {
    targets each;
    for (std::size_t j = 0; j < outputs; ++j) each[j] = out_[j].data == nullptr ? nullptr : &out_[j](n, c, s);
    return each;
  }

  template <int L, class K>
  [[nodiscard, gnu::always_inline]] static results<L> compute(Op const& op, pointers const& from, std::int64_t i,
                                                              K const& k) {
    std::array<vector_t<A, L>, inputs> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) v[j] = load<L>(from[j] + i);
    return op.apply(v, k.template get<L>(i), k.template counted<L>(i));
  }
  template <int L, class K>
  [[nodiscard, gnu::always_inline]] results<L> compute(pointers const& from, std::int64_t i, K const& k) const {
    return compute<L>(op_, from, i, k);
  }

  template <int L>
  [[gnu::always_inline]] static void put(targets const& to, std::int64_t i, results<L> const& v,
                                         std::array<bool, outputs> const& streams) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < outputs; ++j)
      if (streams[j]) {
        stream<L>(to[j] + i, v[j]);
      } else if (to[j] != nullptr) {
        store<L>(to[j] + i, v[j]);
      }
  }

  /// Computes and writes two vectors, of one channel in whatever order is the quickest.
  template <int L, class K>
  [[gnu::always_inline]] static void put_two(Op const& op, pointers const& from, targets const& to, std::int64_t i,
                                             K const& k, std::array<bool, outputs> const& streams) {
    if constexpr (K::of_one_channel && weaves<T, L>) {
      std::array<vector_t<A, L>, inputs> even, odd;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) {
        auto const pair = load_pair<L>(from[j] + i);
        even[j] = pair[0];
        odd[j] = pair[1];
      }
      auto const values = k.template get<L>(i);
      auto const counted = k.template counted_of_pair<L>(i);
      auto const v0 = op.apply(even, values, counted[0]), v1 = op.apply(odd, values, counted[1]);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < outputs; ++j)
        if (streams[j]) {
          stream_pair<L>(to[j] + i, {v0[j], v1[j]});
        } else if (to[j] != nullptr) {
          store_pair<L>(to[j] + i, {v0[j], v1[j]});
        }
    } else {
      auto const v0 = compute<L>(op, from, i, k), v1 = compute<L>(op, from, i + L, k);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < outputs; ++j)
        if (streams[j]) {
          stream_two<L>(to[j] + i, v0[j], v1[j]);
        } else if (to[j] != nullptr) {
          store_two<L>(to[j] + i, v0[j], v1[j]);
        }
    }
  }

  /// Elements [begin, end) of `n`, fewer than a vector's; a vector's are there.
  template <class K>
  void some(pointers const& from, targets const& to, std::int64_t begin, std::int64_t end, std::int64_t n,
            K const& k) const {
    constexpr int L = native_lanes<A>;
    std::int64_t const at = std::min(begin, n - L);
    auto const v = compute<L>(from, at, k);
    for (std::size_t j = 0; j < outputs; ++j)
      if (streams_[j])
        put_lanes<true, L>(to[j] + at, v[j], begin - at, end - at);
      else if (to[j] != nullptr)
        put_lanes<false, L>(to[j] + at, v[j], begin - at, end - at);
  }

  /// A row of `count` elements, fewer than a vector's, with the bits that a vector gives: where multiplications and additions
  /// are contracted, single numbers may be rounded otherwise.
  template <class K>
  [[gnu::noinline]] void short_row(pointers const& from, targets const& to, std::int64_t count, K const& k) const {
    constexpr int L = native_lanes<A>;
    auto const bytes = static_cast<std::size_t>(count) * sizeof(T);
    std::array<T, static_cast<std::size_t>(L)> elements{};
    std::array<vector_t<A, L>, inputs> v;
    for (std::size_t j = 0; j < inputs; ++j) {
      std::memcpy(static_cast<void*>(elements.data()), from[j], bytes);
      v[j] = load<L>(elements.data());
    }
    auto const out = op_.apply(v, k.template get<L>(0), k.template first_counted<L>(count));
    for (std::size_t j = 0; j < outputs; ++j) {
      if (to[j] == nullptr) continue;
      store<L>(elements.data(), out[j]);
      std::memcpy(static_cast<void*>(to[j]), elements.data(), bytes);
    }
  }

  /// Elements from the line of the cache that all outputs begin before `to`, or there; negative where not all are streamed there.
  [[nodiscard]] std::int64_t since_line(targets const& to) const {
    std::int64_t since = -1;
    for (std::size_t j = 0; j < outputs; ++j) {
      if (to[j] == nullptr) continue;
      std::int64_t const its = elements_since_line(to[j]);
      if (!streams_[j] || (since >= 0 && since != its)) return -1;
      since = its;
    }
    return since;
  }

  /// As that of linear_map.
  void run_piece(row_piece const& piece, std::array<std::int64_t, inputs> const& further, bool fetch) const {
    auto const [sample, channel, begin, end, follows, is_followed] = piece;
    auto const* const mask = mask_ == nullptr ? nullptr : mask_->row(sample) + begin;
    constant const k{table_ + channel, period_, mask};
    auto const in = from(sample, channel, begin);
    auto const out = to(sample, channel, begin);
    std::int64_t first = 0, last = end - begin;
    if (std::int64_t const before = since_line(out); before >= 0) {
      if (before != 0 && follows && (begin != 0 || dense_)) {
        stream_seam(in, out, before, begin != 0 ? k : constant{table_ + channel - 1, period_, nullptr}, k);
        first = line_elements<T> - before;
      }
      if (is_followed && (end != in_[0].spatial || dense_)) last -= (before + last) % line_elements<T>;
    }
    run(in, out, end - begin, k, further, fetch, first, last);
  }

  /// As that of linear_map.
  [[gnu::noinline]] void stream_seam(pointers const& in, targets const& out, std::int64_t before,
                                     constant const& k_before, constant const& k) const {
    constexpr int L = native_lanes<A>;
    for (std::int64_t i = -before; i < line_elements<T> - before; i += L) {
      auto const a = compute<L>(in, i, k_before), b = compute<L>(in, i, k);
      for (std::size_t j = 0; j < outputs; ++j)
        if (out[j] != nullptr) stream<L>(out[j] + i, first_lanes<A, L>(a[j], b[j], -i));
    }
  }

  /// `n` contiguous elements, or, where they are streamed, [first, last) of these, as of linear_map.
  template <class K>
  void run(pointers const& from, targets const& to, std::int64_t n, K const& k,
           std::array<std::int64_t, inputs> const& further, bool fetch, std::int64_t first, std::int64_t last) const {
    constexpr int L = native_lanes<A>;
    if (n < L) return short_row(from, to, n, k);
    // Vectors are aligned for the first output that is streamed, and others are streamed where they then are, too.
    std::size_t leader = 0;
    while (leader < outputs && !streams_[leader]) ++leader;
    std::array<bool, outputs> streams{};
    std::int64_t i = first;
    if (leader < outputs) {
      std::int64_t const off = elements_since_vector(to[leader] + i);
      for (std::size_t j = 0; j < outputs; ++j) streams[j] = streams_[j] && elements_since_vector(to[j] + i) == off;
      std::int64_t const head = off == 0 ? i : std::min<std::int64_t>(n, stream_lanes<T> - off);
      for (; i + L <= head; i += L) put<L>(to, i, compute<L>(from, i, k), {});
      if (i < head) some(from, to, i, head, n, k);
      i = head;
      i = vectors(from, to, i, last, k, further, fetch, streams);
      if (i < last) some(from, to, i, n, n, k);
      return;
    }
    // The last vector may overlap the one before it, which in place overwrites what it reads.
    auto const overlapping = compute<L>(from, n - L, k);
    i = vectors(from, to, i, n, k, further, fetch, streams);
    if (i < n) put<L>(to, n - L, overlapping, {});
  }

  /// All whole vectors from `i` on; returns where they end. What it is given and the op are copies, which stay in
  /// registers: of anything else the compiler must suppose that an element that is written changes it.
  template <class K>
  [[nodiscard]] std::int64_t vectors(pointers const& given_from, targets const& given_to, std::int64_t i,
                                     std::int64_t n, K const& given_k,
                                     std::array<std::int64_t, inputs> const& given_further, bool fetch,
                                     std::array<bool, outputs> const& given_streams) const {
    constexpr int L = native_lanes<A>;
    auto const op = op_;
    auto const from = given_from;
    auto const to = given_to;
    auto const k = given_k;
    auto const further = given_further;
    auto const streams = given_streams;
    for (; i + 2 * L <= n; i += 2 * L) {
      if (fetch)
#pragma GCC unroll 8
        for (std::size_t j = 0; j < inputs; ++j) prefetch<2 * L, 2>(from[j], i + further[j]);
      put_two<L>(op, from, to, i, k, streams);
    }
    for (; i + L <= n; i += L)
      put<L>(to, i, compute<L>(op, from, i, k), stream_lanes<T> == L ? streams : std::array<bool, outputs>{});
    return i;
  }

  Op op_;
  views in_;
  out_views out_;
  prepared_mask const* mask_;
  /// Coefficient j of channel c at j·period + c; of several positions one after the other.
  A const* table_;
  std::int64_t period_ = 0, run_positions_ = 1;
  std::array<bool, outputs> streams_{};
  layout layout_ = layout::strided;
  bool folded_ = false;
  /// No mask, and the rows of a sample follow each other without a gap, and are no shorter than a line of the cache.
  bool dense_ = false;
};

template <class T, class Op>
void map_epilogue(executor_ref exec, Op const& op, typename epilogue_map<T, Op>::views const& in,
                  typename epilogue_map<T, Op>::out_views const& out, prepared_mask const* mask, stores how) {
  if (in[0].size() == 0) return;
  scratch_lease<accumulate_t<T>> table{epilogue_map<T, Op>::table_size(in[0])};
  epilogue_map<T, Op> const kernel{op, in, out, mask, how, table.data()};
  map_boxes(exec, kernel);
}

/// As map_of_channels.
template <class T, std::size_t Inputs, std::size_t Outputs, class MakeOp>
[[nodiscard]] auto epilogue_of_channels(std::array<tensor_view<T const>, Inputs> const& in,
                                        std::array<tensor_view<T>, Outputs> const& out, prepared_mask const* mask,
                                        stores how, MakeOp const& make_op) {
  return [=](std::int64_t first, std::int64_t length, accumulate_t<T>* table) {
    auto part = in;
    for (auto& view : part) view = view.channel_range(first, length);
    auto part_out = out;
    for (auto& view : part_out) view = view.channel_range(first, length);
    auto const op = make_op(first, length);
    return epilogue_map<T, std::remove_const_t<decltype(op)>>{op, part, part_out, mask, how, table};
  };
}

} // namespace syncnorm::host::detail
