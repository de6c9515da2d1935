#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

// Vectors of complex numbers, whose lanes are real part and imaginary part in turn.
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Each number with its parts exchanged.
template <class V, std::size_t... Lane>
[[nodiscard, gnu::always_inline]] inline V exchanged(V const& v, std::index_sequence<Lane...>) {
  return shuffle(v, v, std::index_sequence<(Lane ^ 1)...>{});
}
template <class A, int L>
[[nodiscard, gnu::always_inline]] inline vector_t<A, L> exchanged(vector_t<A, L> const& v) {
  return exchanged(v, std::make_index_sequence<static_cast<std::size_t>(L)>{});
}

/// p·a of numbers, of which the coefficients have a's real part twice, and its imaginary part with both signs.
template <class T>
[[nodiscard]] std::array<std::complex<T>, 2> factor_by_lanes(std::complex<T> a) {
  return {{{a.real(), a.real()}, {-a.imag(), a.imag()}}};
}
template <class T, int L>
[[nodiscard, gnu::always_inline]] inline vector_t<T, L> times(vector_t<T, L> const& p, vector_t<T, L> const& real,
                                                              vector_t<T, L> const& imag) {
  return multiply_add<vector_t<T, L>>(p, real, exchanged<T, L>(p) * imag);
}

/// Calls f.operator()<L>(i) for vectors of lanes [0, n), which hold whole numbers.
template <int Lanes, class F>
[[gnu::always_inline]] inline void for_each_numbers(std::int64_t n, F const& f) {
  std::int64_t i = 0;
  for (; i + Lanes <= n; i += Lanes) f.template operator()<Lanes>(i);
  for (; i < n; i += 2) f.template operator()<2>(i);
}

/// Whether numbers whose n lanes are written from `to` on may go past the cache, where `how` says so: whole lines of it, but for the
/// ends of what is long.
template <class T>
[[nodiscard, gnu::always_inline]] inline bool may_stream(T const* to, std::int64_t n, stores how) {
  constexpr std::int64_t line = line_elements<T>, long_run = 16 * line;
  std::int64_t const before = elements_since_line(to);
  return can_stream<T> && how == stores::streaming && before % 2 == 0 &&
         (n >= long_run || (before == 0 && n % line == 0));
}

/// `for_each_numbers` of n lanes that are written from `to` on: f.operator()<L, Stream>(i), of which those to be streamed are whole lines.
template <class T, class F>
[[gnu::always_inline]] inline void for_each_numbers_written(T const* to, std::int64_t n, bool streams, F const& f) {
  constexpr int lanes = native_lanes<T>;
  std::int64_t i = 0;
  if (streams) {
    constexpr std::int64_t line = line_elements<T>;
    std::int64_t const before = elements_since_line(to), begin = std::min(n, before == 0 ? 0 : line - before);
    std::int64_t const end = begin + (n - begin) / line * line;
    for (; i < begin; i += 2) f.template operator()<2, false>(i);
    for (; i < end; i += lanes) f.template operator()<lanes, true>(i);
  }
  for (; i + lanes <= n; i += lanes) f.template operator()<lanes, false>(i);
  for (; i < n; i += 2) f.template operator()<2, false>(i);
}

/// A vector, past the cache if `Stream`.
template <bool Stream, int L, class T>
[[gnu::always_inline]] inline void write(T* to, vector_t<T, L> const& v) {
  if constexpr (Stream)
    stream<L>(to, v);
  else
    store<L>(to, v);
}

/// Numbers that follow each other: of consecutive channels at one position, or at consecutive positions of one channel. All count, or none.
struct number_run {
  std::int64_t sample, channel, position, numbers;
  bool counts;
};

/// Whether the channels of a position follow each other in all of some tensors, and so are gone through position after position, or else
/// row after row. One of several such channels is gone through as all are.
template <class... View>
[[nodiscard]] bool goes_by_positions(View const&... x) {
  return (... && (x.stride_c == 1 && (x.channels > 1 || x.stride_s != 1)));
}

/// Calls f(number_run) for numbers [first, last) of tensors with the same extents, by positions or by rows.
template <class F, class X, class... More>
void for_each_run(bool positions, std::int64_t first, std::int64_t last, mask_view const& mask, F const& f, X const& x,
                  More const&... more) {
  if (first >= last) return;
  bool const dense = x.stride_s == 1 && (... && (more.stride_s == 1));
  std::int64_t const inner = positions ? x.channels : x.spatial, outer = positions ? x.spatial : x.channels;
  std::int64_t n = first / (inner * outer), at = first / inner % outer, begin = first % inner;
  auto const counts = [&](std::int64_t s) { return !mask || mask(n, s); };
  while (first < last) {
    std::int64_t const end = std::min(inner, begin + last - first);
    first += end - begin;
    if (positions) {
      f(number_run{n, begin, at, end - begin, counts(at)});
    } else {
      while (begin < end) {
        bool const same = counts(begin);
        std::int64_t next = !dense ? begin + 1 : !mask ? end : begin + 1;
        while (dense && next < end && counts(next) == same) ++next;
        f(number_run{n, at, begin, next - begin, same});
        begin = next;
      }
    }
    begin = 0;
    if (++at == outer) at = 0, ++n;
  }
}

/// Calls f(first, last) for parts of the numbers of a tensor, possibly at the same time.
template <class T, class F>
void for_each_part(executor_ref exec, tensor_view<T> const& x, F const& f) {
  constexpr std::int64_t part = 16384;
  exec.for_each(ceil_div(x.size(), part), [&](std::int64_t i) {
    f(i * part, std::min(x.size(), (i + 1) * part));
    stream_fence();
  });
}

/// Calls f(first, length) for parts of the channels of a tensor, possibly at the same time.
template <class T, class F>
void for_each_part_of_channels(executor_ref exec, tensor_view<T> const& x, F const& f) {
  constexpr std::int64_t most = 256;
  if (x.channels == 0) return;
  std::int64_t const part = std::min(most, ceil_div(x.channels, exec.concurrency()));
  exec.for_each(ceil_div(x.channels, part),
                [&](std::int64_t i) { f(i * part, std::min(part, x.channels - i * part)); });
}

/// Coefficients of channels, each of which has a real and an imaginary part.
template <class T, std::size_t Count>
class component_table {
public:
  explicit component_table(std::int64_t channels)
      : step_{2 * channels}, memory_{static_cast<std::int64_t>(Count) * step_} {}

  void set(std::int64_t channel, std::array<std::complex<T>, Count> const& values) {
    for (std::size_t j = 0; j < Count; ++j) {
      T* const at = memory_.data() + static_cast<std::int64_t>(j) * step_ + 2 * channel;
      at[0] = values[j].real();
      at[1] = values[j].imag();
    }
  }

  /// Calls f(k), where k.get<L>(j, i) is coefficient j of the lanes of `run` from `i` on.
  template <class F>
  [[gnu::always_inline]] void with(number_run const& run, bool positions, F const& f) const {
    T const* const of = memory_.data() + 2 * run.channel;
    if (positions)
      f(of_channels{of, step_});
    else
      f(of_one{of, step_});
  }

private:
  struct of_channels {
    T const* at;
    std::int64_t step;

    template <int L>
    [[gnu::always_inline]] vector_t<T, L> get(std::size_t j, std::int64_t i) const {
      return load<L>(at + static_cast<std::int64_t>(j) * step + i);
    }
  };
  struct of_one {
    static constexpr int lanes = native_lanes<T>;
    std::array<vector_t<T, lanes>, Count> values;

    [[gnu::always_inline]] of_one(T const* at, std::int64_t step) {
#pragma GCC unroll 16
      for (std::size_t j = 0; j < Count; ++j, at += step) values[j] = repeated(at);
    }
    [[gnu::always_inline]] static vector_t<T, lanes> repeated(T const* pair) {
      vector_t<T, lanes> all;
      if constexpr (sizeof(T) == 4) { // as one integer, of which there are instructions
        std::int64_t bits;
        std::memcpy(&bits, pair, sizeof bits);
        auto const wide = splat<std::int64_t, lanes / 2>(bits);
        std::memcpy(&all, &wide, sizeof all);
      } else {
        all = in_turn(splat<T, lanes>(pair[0]), splat<T, lanes>(pair[1]),
                      std::make_index_sequence<static_cast<std::size_t>(lanes)>{});
      }
      return all;
    }
    template <std::size_t... Lane>
    [[gnu::always_inline]] static auto in_turn(vector_t<T, lanes> const& even, vector_t<T, lanes> const& odd,
                                               std::index_sequence<Lane...>) {
      return shuffle(even, odd, std::index_sequence<(Lane % 2 == 0 ? Lane : Lane + sizeof...(Lane))...>{});
    }
    template <int L>
    [[gnu::always_inline]] vector_t<T, L> get(std::size_t j, std::int64_t) const {
      vector_t<T, L> some;
      std::memcpy(&some, &values[j], sizeof some);
      return some;
    }
  };

  std::int64_t step_;
  scratch_lease<T> memory_;
};

/// Sums of the numbers of channels in double, by lanes.
template <std::size_t Count>
class lane_sums {
  static constexpr int lanes = native_lanes<double>;

public:
  /// Of tensors that go by positions, or by rows.
  lane_sums(std::int64_t channels, bool positions)
      : positions_{positions}, of_channel_{positions ? 2 : lanes}, step_{channels * of_channel_},
        memory_{static_cast<std::int64_t>(Count) * step_} {
    std::fill_n(memory_.data(), static_cast<std::int64_t>(Count) * step_, 0.0);
  }

  /// Calls add.operator()<L>(i, sums) for the lanes of `run` from `i` on, to whose sums it adds.
  template <class Add>
  [[gnu::always_inline]] void add(number_run const& run, Add const& add) {
    double* const of = memory_.data() + run.channel * of_channel_;
    std::int64_t const n = 2 * run.numbers;
    if (positions_)
      for_each_numbers<lanes>(
          n, [&]<int L>(std::int64_t i) __attribute__((always_inline)) { add_to<L>(of + i, i, add); });
    else
      add_row(of, n, add);
  }

  /// Sum j of a channel: of the lanes of real parts, and of those of imaginary parts.
  [[nodiscard]] std::array<double, 2> of(std::size_t j, std::int64_t channel) const {
    double const* const at = memory_.data() + static_cast<std::int64_t>(j) * step_ + channel * of_channel_;
    std::array<double, 2> all{at[0], at[1]};
    for (std::int64_t i = 2; i < of_channel_; i += 2) all[0] += at[i], all[1] += at[i + 1];
    return all;
  }

private:
  /// Sums that are made beside each other, as far as registers go, since each waits for the one before.
  static constexpr std::size_t chains = std::clamp<std::size_t>(8 / Count, 1, 4);

  template <int L, class Add>
  [[gnu::always_inline]] void add_to(double* at, std::int64_t i, Add const& add) {
    std::array<vector_t<double, L>, Count> sums;
#pragma GCC unroll 16
    for (std::size_t j = 0; j < Count; ++j) sums[j] = load<L>(at + static_cast<std::int64_t>(j) * step_);
    add.template operator()<L>(i, sums);
#pragma GCC unroll 16
    for (std::size_t j = 0; j < Count; ++j) store<L>(at + static_cast<std::int64_t>(j) * step_, sums[j]);
  }

  /// Of numbers of one channel.
  template <class Add>
  [[gnu::always_inline]] void add_row(double* of, std::int64_t n, Add const& add) {
    constexpr auto together = static_cast<std::int64_t>(chains) * lanes;
    if (n < together)
      return for_each_numbers<lanes>(
          n, [&]<int L>(std::int64_t i) __attribute__((always_inline)) { add_to<L>(of, i, add); });
    std::array<std::array<vector_t<double, lanes>, Count>, chains> sums{};
    std::int64_t i = 0;
    for (; i + together <= n; i += together) {
#pragma GCC unroll 4
      for (std::size_t k = 0; k < chains; ++k)
        add.template operator()<lanes>(i + static_cast<std::int64_t>(k) * lanes, sums[k]);
    }
    for (; i + lanes <= n; i += lanes) add.template operator()<lanes>(i, sums[0]);
#pragma GCC unroll 16
    for (std::size_t j = 0; j < Count; ++j) {
      double* const at = of + static_cast<std::int64_t>(j) * step_;
      auto all = load<lanes>(at);
#pragma GCC unroll 4
      for (std::size_t k = 0; k < chains; ++k) all += sums[k][j];
      store<lanes>(at, all);
    }
    for (; i < n; i += 2) add_to<2>(of, i, add);
  }

  bool positions_;
  std::int64_t of_channel_, step_;
  scratch_lease<double> memory_;
};

/// Numbers from `from` on in double.
template <int L, class T>
[[nodiscard, gnu::always_inline]] inline vector_t<double, L> load_wide(T const* from) {
  return __builtin_convertvector(load<L>(from), vector_t<double, L>);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
