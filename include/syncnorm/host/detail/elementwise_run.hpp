#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/streaming.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// How an `elementwise_map` computes contiguous elements, with coefficients as `coefficients_of.hpp` has them: in whole vectors, and
/// past the cache those outputs that are streamed.
template <class T, class Op>
class elementwise_run {
  using A = accumulate_t<T>;
  static constexpr int L = native_lanes<A>;
  static constexpr std::size_t inputs = Op::inputs, outputs = Op::outputs;
  using vector = vector_t<A, L>;
  using results = std::array<vector, outputs>;

public:
  using pointers = std::array<T const*, inputs>;
  using targets = std::array<T*, outputs>; ///< null: not wanted
  using distances = std::array<std::int64_t, inputs>;
  using per_output = std::array<bool, outputs>;

  /// Where of `n` elements the first whole line of the cache begins and the last ends.
  [[nodiscard, gnu::always_inline]] static std::array<std::int64_t, 2> whole_lines(T const* out, std::int64_t n) {
    std::int64_t const before = elements_since_line(out), first = before == 0 ? 0 : line_elements<T> - before;
    return {first, n - (n - first) % line_elements<T>};
  }

  elementwise_run(Op const& op, per_output const& streams) : op_{op}, streams_{streams} {}

  [[nodiscard]] Op const& op() const { return op_; }

  /// The whole lines of the cache in pieces of a channel, whose outputs are all streamed and alike in where lines begin, as another loop goes
  /// through as many elements: four vectors between its own.
  template <class K>
  class interleaved {
  public:
    /// The channel begins at `in` and `out`, and its rows are so many elements apart.
    [[gnu::always_inline]] interleaved(Op const& op, pointers const& in, distances const& in_rows, targets const& out,
                                       std::array<std::int64_t, outputs> const& out_rows, K const& k)
        : op_{op}, channel_in_{in}, in_rows_{in_rows}, channel_out_{out}, out_rows_{out_rows}, k_{k} {}

    /// Goes on with `n` elements of a row, two lines at least, from position `begin` on.
    [[gnu::always_inline]] void move_to(std::int64_t row, std::int64_t begin, std::int64_t n) {
      auto const [first, last] = whole_lines(channel_out_[0] + row * out_rows_[0] + begin, n);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) in_[j] = channel_in_[j] + row * in_rows_[j] + begin + first;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < outputs; ++j) out_[j] = channel_out_[j] + row * out_rows_[j] + begin + first;
      n_ = last - first;
    }

    /// The four vectors after those of the other loop at element `i`, a multiple of as many.
    [[gnu::always_inline]] void operator()(std::int64_t i) const {
      pair(i);
      pair(i + 2 * L);
    }
    /// Two of them.
    [[gnu::always_inline]] void pair(std::int64_t i) const {
      if (i + 2 * L <= n_) put_two(op_, in_, out_, i, k_, all_streamed);
    }

    /// What is left after the last four of the `n` elements.
    [[gnu::always_inline]] void finish(std::int64_t n) const {
      std::int64_t i = std::min(n / (4 * L) * (4 * L), n_ / (2 * L) * (2 * L));
      for (; i + 2 * L <= n_; i += 2 * L) put_two(op_, in_, out_, i, k_, all_streamed);
      if constexpr (line_elements<T> < 2 * L)
        if (i < n_) put(out_, i, compute(op_, in_, i, k_), all_streamed);
    }

  private:
    static constexpr per_output all_streamed = [] {
      per_output all{};
      all.fill(true);
      return all;
    }();

    Op op_;
    pointers channel_in_;
    distances in_rows_;
    targets channel_out_;
    std::array<std::int64_t, outputs> out_rows_;
    K k_;
    pointers in_{}; ///< and out_: from the first line on that begins in the piece
    targets out_{};
    std::int64_t n_ = 0;
  };

  /// `n` contiguous elements, or, where they are streamed, [first, last) of these, which both are 0, `n`, or where a line begins.
  /// `fetch`: those `further` on, for the second-level cache.
  template <class K>
  [[gnu::noinline]] void operator()(pointers const& in, targets const& out, std::int64_t n, K const& k,
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

private:
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
    std::array<T, static_cast<std::size_t>(L)> elements;
    std::memset(static_cast<void*>(elements.data()), 0, sizeof elements);
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
  per_output streams_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
