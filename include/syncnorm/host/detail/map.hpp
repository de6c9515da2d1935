#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

/// Cuts `[N, C, S]` into boxes of about `box_elements`, of which every element belongs to one.
class boxes {
public:
  static constexpr std::int64_t box_elements = 1 << 17;

  struct box {
    std::int64_t channel, channels, sample, samples, position, positions;
  };

  /// `narrowest`: as many channels as there are belong to a box, up to this. `widest`: and no more.
  boxes(std::int64_t samples, std::int64_t channels, std::int64_t spatial, std::int64_t narrowest,
        std::int64_t widest = box_elements)
      : samples_{samples}, channels_{channels}, spatial_{spatial} {
    if (samples * channels * spatial == 0) return;
    std::int64_t const fitting = box_elements / std::min(spatial, box_elements) / 16 * 16;
    c_ = even_part(channels, std::clamp(fitting, narrowest, widest));
    s_ = even_part(spatial, std::max<std::int64_t>(16, box_elements / c_ / 16 * 16));
    n_ = std::clamp<std::int64_t>(box_elements / (c_ * s_), 1, samples);
    count_ = ceil_div(channels, c_) * ceil_div(spatial, s_) * ceil_div(samples, n_);
  }

  [[nodiscard]] std::int64_t count() const { return count_; }

  [[nodiscard]] box operator[](std::int64_t i) const {
    std::int64_t const over_s = ceil_div(spatial_, s_), over_c = ceil_div(channels_, c_);
    std::int64_t const s = i % over_s * s_, c = i / over_s % over_c * c_, n = i / over_s / over_c * n_;
    return {c, std::min(c_, channels_ - c), n, std::min(n_, samples_ - n), s, std::min(s_, spatial_ - s)};
  }

private:
  std::int64_t samples_, channels_, spatial_, n_ = 0, c_ = 0, s_ = 0, count_ = 0;
};

/// Computes the boxes of a map, the last ones first: what was read last is the likeliest to be in the cache still.
template <class Map>
void map_boxes(executor_ref exec, Map const& map, std::int64_t channels_ahead = 0) {
  boxes const tasks = map.tasks();
  exec.for_each(tasks.count(), [&](std::int64_t i) {
    map(tasks[tasks.count() - 1 - i], channels_ahead);
    stream_fence();
  });
}

/// Numbers that so many coefficients of a channel take for tensors like `x`.
template <class A, class T>
[[nodiscard]] constexpr std::int64_t coefficient_table_size(tensor_view<T> const& x, std::size_t coefficients) {
  return static_cast<std::int64_t>(coefficients) * (x.channels * (table_folds(x) ? x.spatial : 1) + chunk_channels<A>);
}

/// Positions that a run takes where few channels follow each other without a gap to the next position.
template <class A, class T>
[[nodiscard]] constexpr std::int64_t positions_of_run(tensor_view<T> const& x) {
  return std::clamp<std::int64_t>(chunk_channels<A> / std::max<std::int64_t>(1, x.channels), 1,
                                  std::max<std::int64_t>(1, x.spatial));
}

/// The boxes of a map of tensors like `x`. Where positions are taken for channels, `folds`, the coefficients of a box fit the
/// first-level cache.
template <class A, class T>
[[nodiscard]] boxes boxes_of_map(tensor_view<T> const& x, layout of, bool folds) {
  return {x.samples, x.channels, x.spatial, of == layout::channels ? chunk_channels<A> : 16,
          folds ? chunk_channels<A> : boxes::box_elements};
}

/// Coefficient j of lane i at table[j·period + i]. Those of a channel, `op(channel)`, stand for `fold` lanes, and those of
/// all `lanes` are repeated up to `period`.
template <class A, class Op>
void fill_coefficients(A* table, Op const& op, std::int64_t lanes, std::int64_t fold, std::int64_t period) {
  constexpr int L = native_lanes<A>;
  if (fold == 1) {
    for (std::int64_t c = 0; c < lanes; ++c) {
      auto const values = op(c);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < Op::coefficients; ++j) table[static_cast<std::int64_t>(j) * period + c] = values[j];
    }
  } else {
    for (std::int64_t c = 0, lane = 0; lane < lanes; ++c, lane += fold) {
      auto const values = op(c);
      for (std::size_t j = 0; j < Op::coefficients; ++j) {
        A* const of = table + static_cast<std::int64_t>(j) * period;
        // A vector may go on into the lanes of the next channels, which come later.
        for (std::int64_t i = lane; i < lane + fold; i += L) {
          if (i + L <= lanes)
            store<L>(of + i, splat<A, L>(values[j]));
          else
            std::fill_n(of + i, lane + fold - i, values[j]);
        }
      }
    }
  }
  for (std::size_t j = 0; j < Op::coefficients; ++j) {
    A* const of = table + static_cast<std::int64_t>(j) * period;
    for (std::int64_t i = lanes; i < period; i *= 2) std::copy_n(of, std::min(i, period - i), of + i);
  }
}

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

/// Elementwise out = Σ in_j·scale_j + (x − center)·scale + shift, x being the last input and the scales, the center and the shift
/// those of the channel. A `Terms` gives them:
///
///     static constexpr std::size_t inputs, coefficients = inputs + 2;
///     std::array<A, coefficients> operator()(channel)        scale_j…, scale, center, shift
template <class T, std::size_t Inputs>
class linear_map {
  using A = accumulate_t<T>;
  static constexpr std::size_t coefficients = Inputs + 2;
  using pointers = std::array<T const*, Inputs>;

public:
  static constexpr std::size_t inputs = Inputs;
  using views = std::array<tensor_view<T const>, inputs>;

  /// Numbers of type `A` that the coefficients for tensors like `x` take.
  template <class X>
  static constexpr std::int64_t table_size(tensor_view<X> const& x) {
    return coefficient_table_size<A>(x, coefficients);
  }

  template <class Terms>
  linear_map(Terms const& terms_of, views const& in, tensor_view<T> const& out, stores how, A* table)
      : in_{in}, out_{out}, table_{table} {
    bool in_place = false;
    for (auto const& x : in) in_place |= x.data == out.data;
    if (how == stores::automatic) how = stores_for(out);
    std::int64_t fold = 1;
    if (table_folds(out) && std::ranges::all_of(in, [](auto const& x) { return table_folds(x); })) {
      fold = out.spatial;
      folded_ = true;
      out_ = folded(out);
      for (auto& x : in_) x = folded(x);
    }
    layout_ = std::apply([&](auto const&... x) { return common_layout(out_, x...); }, in_);
    // In place, the lines to be written are in the cache already.
    stream_ = how == stores::streaming && can_stream<T> && !in_place && layout_ != layout::strided;
    auto const dense_rows = [](auto const& view) { return view.stride_c == view.spatial; };
    dense_ = layout_ == layout::rows && out_.spatial >= line_elements<T> && dense_rows(out_) &&
             std::ranges::all_of(in_, dense_rows);
    // Few channels without a gap to the next position: a run takes several positions.
    auto const dense = [](auto const& view) { return view.stride_s == view.channels; };
    std::int64_t const channels = out_.channels;
    if (layout_ == layout::channels && dense(out_) && std::ranges::all_of(in_, dense))
      run_positions_ = positions_of_run<A>(out_);
    period_ = channels * run_positions_;
    fill_coefficients(table, terms_of, channels, fold, period_);
  }

  [[nodiscard]] boxes tasks() const { return boxes_of_map<A>(out_, layout_, folded_); }

  /// Computes one box. Meanwhile fetches the inputs `channels_ahead` further, unless that is 0. `stream_fence` must follow.
  [[gnu::noinline]] void operator()(boxes::box const& box, std::int64_t channels_ahead = 0) const {
    if (stream_) {
      channels_ahead != 0 ? run_box<true, true>(box, channels_ahead) : run_box<true, false>(box, 0);
    } else {
      channels_ahead != 0 ? run_box<false, true>(box, channels_ahead) : run_box<false, false>(box, 0);
    }
  }

  /// Computes a piece, where rows are contiguous, and meanwhile fetches the inputs at a distance, if any. `stream_fence` must
  /// follow.
  void operator()(row_piece const& piece, std::optional<row_distance> const& to_fetch) const {
    auto const ahead = to_fetch.value_or(row_distance{});
    std::array<std::int64_t, inputs> further{};
    for (std::size_t j = 0; j < inputs; ++j)
      further[j] = ahead.channels * in_[j].stride_c + ahead.samples * in_[j].stride_n + ahead.positions;
    if (stream_)
      to_fetch ? run_piece<true, true>(piece, further) : run_piece<true, false>(piece, further);
    else
      to_fetch ? run_piece<false, true>(piece, further) : run_piece<false, false>(piece, further);
  }

private:
  template <bool Stream, bool Fetch>
  void run_box(boxes::box const& box, std::int64_t channels_ahead) const {
    std::array<std::int64_t, inputs> further{};
    for (std::size_t j = 0; j < inputs; ++j) further[j] = channels_ahead * in_[j].stride_c;
    for (std::int64_t n = box.sample; n < box.sample + box.samples; ++n) {
      if (layout_ == layout::channels) {
        per_channel const k{table_ + box.channel, period_};
        bool const fetch = Stream && !folded_; // what is folded is in the cache, or in runs too short for this
        std::array<std::int64_t, inputs> far;
        far.fill(elements_ahead<T>(inputs));
        std::int64_t const end = box.position + box.positions;
        for (std::int64_t s = box.position; s < end; s += run_positions_) {
          std::int64_t const length = box.channels * std::min(run_positions_, end - s);
          auto const from = at(n, box.channel, s);
          T* const to = &out_(n, box.channel, s);
          if (fetch) // NOLINT(bugprone-branch-clone): clones where nothing is streamed
            run<Stream, Stream>(from, to, length, k, far, 0, length);
          else
            run<Stream, false>(from, to, length, k, far, 0, length);
        }
        continue;
      }
      bool const whole = box.positions == out_.spatial;
      for (std::int64_t c = box.channel; c < box.channel + box.channels; ++c) {
        std::int64_t const end = box.position + box.positions;
        if (layout_ == layout::rows) {
          bool const first = c == box.channel, last = c + 1 == box.channel + box.channels;
          run_piece<Stream, Fetch>({n, c, box.position, end, whole && !first, whole && !last}, further);
        } else {
          constant const k{table_ + c, period_};
          for (std::int64_t s = box.position; s < end; ++s) store<1>(&out_(n, c, s), compute<1>(at(n, c, s), 0, k));
        }
      }
    }
  }

  /// Streams the lines of the cache that end in the piece: what is before the piece in the first of them is computed once more, and
  /// what is left in the last comes with the next piece. A line that is written in two parts takes several times as long.
  template <bool Stream, bool Fetch>
  void run_piece(row_piece const& piece, std::array<std::int64_t, inputs> const& further) const {
    auto const [sample, channel, begin, end, follows, is_followed] = piece;
    constant const k{table_ + channel, period_};
    auto const from = at(sample, channel, begin);
    T* const to = &out_(sample, channel, begin);
    std::int64_t first = 0, last = end - begin;
    if constexpr (Stream) {
      if (std::int64_t const before = elements_since_line(to); before != 0 && follows && (begin != 0 || dense_)) {
        if (begin != 0)
          stream_seam(from, to, before, k, k);
        else
          stream_seam(from, to, before, {table_ + channel - 1, period_}, k);
        first = line_elements<T> - before;
      }
      if (is_followed && (end != out_.spatial || dense_)) last -= elements_since_line(to + last);
    }
    run<Stream, Fetch>(from, to, end - begin, k, further, first, last);
  }

  /// The coefficients of one channel.
  struct constant {
    static constexpr bool of_one_channel = true;
    std::array<vector_t<A, native_lanes<A>>, coefficients> wide;
    std::array<A, coefficients> single;

    constant(A const* table, std::int64_t step) {
      for (std::size_t j = 0; j < coefficients; ++j) {
        single[j] = table[static_cast<std::int64_t>(j) * step];
        wide[j] = splat<A, native_lanes<A>>(single[j]);
      }
    }
    template <int L>
    [[gnu::always_inline]] auto const& get(std::int64_t) const {
      if constexpr (L == 1) {
        return single;
      } else {
        return wide;
      }
    }
  };

  /// The coefficients of consecutive channels.
  struct per_channel {
    static constexpr bool of_one_channel = false;
    A const* table;
    std::int64_t step;

    template <int L>
    [[gnu::always_inline]] auto get(std::int64_t i) const {
      std::array<vector_t<A, L>, coefficients> v;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < coefficients; ++j) v[j] = load<L>(table + static_cast<std::int64_t>(j) * step + i);
      return v;
    }
  };

  [[nodiscard]] pointers at(std::int64_t n, std::int64_t c, std::int64_t s) const {
    pointers from;
    for (std::size_t j = 0; j < inputs; ++j) from[j] = &in_[j](n, c, s);
    return from;
  }

  template <int L>
  using vectors = std::array<vector_t<A, L>, inputs>;

  template <int L, class Values>
  [[gnu::always_inline]] static vector_t<A, L> combine(vectors<L> const& v, Values const& values) {
    using vector = vector_t<A, L>;
    vector sum = multiply_add<vector>(v[inputs - 1] - values[inputs], values[inputs - 1], values[inputs + 1]);
#pragma GCC unroll 8
    for (std::size_t j = 1; j < inputs; ++j) sum = multiply_add<vector>(v[inputs - 1 - j], values[inputs - 1 - j], sum);
    return sum;
  }

  template <int L, class K>
  [[gnu::always_inline]] static vector_t<A, L> compute(pointers const& from, std::int64_t i, K const& k) {
    vectors<L> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) v[j] = load<L>(from[j] + i);
    return combine<L>(v, k.template get<L>(i));
  }

  template <bool Stream, int L>
  [[gnu::always_inline]] static void put(T* to, vector_t<A, L> const& v) {
    if constexpr (Stream) {
      stream<L>(to, v);
    } else {
      store<L>(to, v);
    }
  }

  /// Computes and writes two vectors, of one channel in whatever order is the quickest.
  template <bool Stream, int L, class K>
  [[gnu::always_inline]] static void put_two(pointers const& from, T* to, std::int64_t i, K const& k) {
    if constexpr (K::of_one_channel) {
      std::array<vectors<L>, 2> v;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) {
        auto const pair = load_pair<L>(from[j] + i);
        v[0][j] = pair[0];
        v[1][j] = pair[1];
      }
      auto const& values = k.template get<L>(i);
      std::array<vector_t<A, L>, 2> const out{combine<L>(v[0], values), combine<L>(v[1], values)};
      if constexpr (Stream)
        stream_pair<L>(to + i, out);
      else
        store_pair<L>(to + i, out);
    } else {
      auto const v0 = compute<L>(from, i, k), v1 = compute<L>(from, i + L, k);
      if constexpr (Stream)
        stream_two<L>(to + i, v0, v1);
      else
        store_two<L>(to + i, v0, v1);
    }
  }

  template <int L>
  [[gnu::always_inline]] static void fetch(pointers const& from, std::int64_t i,
                                           std::array<std::int64_t, inputs> const& further) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) prefetch<4 * L, 2>(from[j], i + further[j]);
  }

  /// Streams elements [begin, end) of `n`, fewer than a vector's; a vector's are there.
  template <class K>
  static void some(pointers const& from, T* to, std::int64_t begin, std::int64_t end, std::int64_t n, K const& k) {
    constexpr int L = native_lanes<A>;
    if constexpr (sizeof(T) == sizeof(A)) {
      for (; begin < end; ++begin) stream<1>(to + begin, compute<1>(from, begin, k));
    } else {
      std::int64_t const at = std::min(begin, n - L);
      put_lanes<true, L>(to + at, compute<L>(from, at, k), begin - at, end - at);
    }
  }

  /// Streams a line of the cache, which begins `before` elements before `to`. Those have the coefficients `k_before`.
  static void stream_seam(pointers const& from, T* to, std::int64_t before, constant const& k_before,
                          constant const& k) {
    constexpr int L = native_lanes<A>;
    for (std::int64_t i = -before; i < line_elements<T> - before; i += L)
      stream<L>(to + i, first_lanes<A, L>(compute<L>(from, i, k_before), compute<L>(from, i, k), -i));
  }

  /// `n` contiguous elements, or, where they are streamed, [first, last) of these, which both are 0, `n`, or where a line begins.
  /// `Fetch`: those `further` on, for the second-level cache.
  template <bool Stream, bool Fetch, class K>
  static void run(pointers const& from, T* to, std::int64_t n, K const& k,
                  std::array<std::int64_t, inputs> const& further, std::int64_t first, std::int64_t last) {
    constexpr int L = native_lanes<A>;
    std::int64_t i = first;
    if (n < L) {
      for (; i < n; ++i) store<1>(to + i, compute<1>(from, i, k));
      return;
    }
    if constexpr (Stream) {
      std::int64_t const off = elements_since_vector(to + i);
      std::int64_t const head = off == 0 ? i : std::min<std::int64_t>(n, stream_lanes<T> - off);
      for (; i + L <= head; i += L) store<L>(to + i, compute<L>(from, i, k));
      if (i < head) some(from, to, i, head, n, k);
      i = head;
    }
    // The last vector may overlap the one before it, which in place overwrites what it reads.
    auto const overlapping = Stream ? vector_t<A, L>{} : compute<L>(from, n - L, k);
    for (; i + 4 * L <= last; i += 4 * L) {
      if constexpr (Fetch) fetch<L>(from, i, further);
      put_two<Stream, L>(from, to, i, k);
      put_two<Stream, L>(from, to, i + 2 * L, k);
    }
    if constexpr (Fetch)
      if (i < last) fetch<L>(from, i, further);
    if (i + 2 * L <= last) {
      put_two<Stream, L>(from, to, i, k);
      i += 2 * L;
    }
    // Half a line that is streamed by itself takes several times as long.
    if (i + L <= last) {
      put<Stream && stream_lanes<T> == L, L>(to + i, compute<L>(from, i, k));
      i += L;
    }
    if (i >= last) return;
    if constexpr (Stream)
      some(from, to, i, n, n, k);
    else
      store<L>(to + n - L, overlapping);
  }

  views in_;
  tensor_view<T> out_;
  /// Coefficient j of channel c at j·period + c; of several positions one after the other.
  A* table_;
  std::int64_t period_ = 0, run_positions_ = 1;
  layout layout_ = layout::strided;
  bool stream_ = false, folded_ = false;
  /// The rows of a sample follow each other without a gap, and are no shorter than a line of the cache.
  bool dense_ = false;
};

/// Makes the map of channels [first, first + length), with the coefficients `make(first, length)`, for `reduce_and_map`.
template <class T, std::size_t Inputs, class Make>
[[nodiscard]] auto map_of_channels(std::array<tensor_view<T const>, Inputs> const& in, tensor_view<T> const& out,
                                   stores how, Make const& make) {
  return [=](std::int64_t first, std::int64_t length, accumulate_t<T>* table) {
    auto part = in;
    for (auto& view : part) view = view.channel_range(first, length);
    return linear_map<T, Inputs>{make(first, length), part, out.channel_range(first, length), how, table};
  };
}

template <class T, class Terms>
void map_channels(executor_ref exec, Terms const& terms_of, std::array<tensor_view<T const>, Terms::inputs> const& in,
                  tensor_view<T> const& out, stores how, next_block fetch = {}) {
  using map_type = linear_map<T, Terms::inputs>;
  if (out.size() == 0) return;
  scratch_lease<accumulate_t<T>> table{map_type::table_size(out)};
  map_type const map{terms_of, in, out, how, table.data()};
  map_boxes(exec, map, fetch.channels_ahead);
}

} // namespace syncnorm::host::detail
