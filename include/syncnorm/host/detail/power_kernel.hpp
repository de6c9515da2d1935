#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/detail/vector.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

// What the kernels of power norm have in common. Each of its passes reads its tensors once, sums and writes on the way,
// and scales groups of channels first where it has to.
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Groups of channels that are scaled, u = x·r with r = 1/√(mean of x² in the group + eps). `width` channels make a group; 0:
/// nothing is scaled, u = x.
struct channel_groups {
  std::int64_t width = 0;
  double eps = 0;

  template <class A>
  [[nodiscard]] A inverse_root(A sum_of_squares) const {
    return A{1} / std::sqrt(sum_of_squares / static_cast<A>(width) + static_cast<A>(eps));
  }
};

/// Whether the mask says that the position does not count.
[[nodiscard]] inline bool is_masked(mask_view const& mask, std::int64_t n, std::int64_t s) {
  return mask.data != nullptr && !mask(n, s);
}

/// Elements of a run that is short enough for sums of floats.
inline constexpr std::int64_t longest_power_run = 512;

/// One run of a row in the type of its arithmetic.
template <class A>
using run_buffer = std::array<A, static_cast<std::size_t>(longest_power_run)>;

/// Calls f.template operator()<L>(i) for vectors of `L` lanes at i, then f.template operator()<1>(i) for what is left.
template <int L, class F>
inline void for_each_lanes(std::int64_t n, F const& f) {
  std::int64_t i = 0;
  for (; i + L <= n; i += L) f.template operator()<L>(i);
  for (; i < n; ++i) f.template operator()<1>(i);
}

/// How an output is written: past the cache, where that takes whole lines of it, or so many that those at their ends, which go
/// through it, are few.
struct power_stores {
  bool streams, whole_lines;

  /// Of rows.
  template <class T>
  [[nodiscard]] static power_stores of_rows(tensor_view<T> const& out, bool in_place) {
    bool const whole = begins_line(out, out.stride_c) && out.spatial % line_elements<T> == 0;
    return {may_stream(out, in_place) && has_rows(out) && (whole || out.spatial >= many<T>), whole};
  }
  /// Of contiguous channels, groups of `width` or, by 0, all at a time. The output is as large as `all` of which it is a part.
  template <class T>
  [[nodiscard]] static power_stores of_channels(tensor_view<T> const& out, std::int64_t width,
                                                tensor_view<T> const& all, bool in_place) {
    bool const whole = begins_line(out, elements_to_next(out)) && (width | out.channels) % line_elements<T> == 0;
    bool const enough = (width == 0 ? out.channels : width) >= many<T>;
    return {may_stream(all, in_place) && has_contiguous_channels(out) && (whole || enough), whole};
  }

private:
  template <class T>
  static constexpr std::int64_t many = 16 * line_elements<T>;

  template <class T>
  [[nodiscard]] static bool begins_line(tensor_view<T> const& out, std::int64_t step) {
    return elements_since_line(out.data) == 0 && (out.stride_n | step) % line_elements<T> == 0;
  }
  template <class T>
  [[nodiscard]] static bool may_stream(tensor_view<T> const& out, bool in_place) {
    return can_stream<T> && stores_for(out) == stores::streaming && !in_place;
  }
};

/// Calls f.template operator()<L>(i, whether it is streamed) for vectors, and f.template operator()<1>(i, false) for what is left, of what is
/// written to `to`.
template <int L, class T, class F>
inline void for_each_lanes_of(T const* to, std::int64_t n, power_stores const& how, F const& f) {
  constexpr std::int64_t line = line_elements<T>;
  std::int64_t i = 0, last = n;
  if (how.streams && !how.whole_lines) {
    for (std::int64_t const first = std::min(n, (line - elements_since_line(to)) % line); i < first; ++i)
      f.template operator()<1>(i, false);
    last = n - (n - i) % line;
  }
  for (; i + L <= last; i += L) f.template operator()<L>(i, how.streams);
  for (; i < n; ++i) f.template operator()<1>(i, false);
}

/// Writes a vector or a single element, the former past the cache if it `streams`.
template <int Lanes, class T>
[[gnu::always_inline]] inline void put(T* to, vector_t<accumulate_t<T>, Lanes> const& v, bool streams) {
  if (Lanes > 1 && streams)
    stream<Lanes>(to, v);
  else
    store<Lanes>(to, v);
}

/// Elements from a position of contiguous channels, of so many tensors like `x`, to what is fetched meanwhile.
template <class T>
[[nodiscard]] std::int64_t elements_to_fetch(tensor_view<T> const& x, std::size_t inputs) {
  return elements_to_next(x) * std::max<std::int64_t>(1, elements_ahead<T>(inputs) / x.channels);
}
/// Has the pages found that a later position touches, a page or a position after what is `ahead` of the one at `from`.
template <class T>
[[gnu::always_inline]] inline void find_position(tensor_view<T> const& x, std::type_identity_t<T> const* from,
                                                 std::int64_t ahead) {
  std::int64_t const next = elements_to_next(x);
  find_pages(from, ahead + std::max(next, page_elements<std::remove_const_t<T>>), x.channels, next == x.channels);
}
template <int Lanes, class T>
[[gnu::always_inline]] inline void fetch(T const* from, std::int64_t first) {
  if constexpr (Lanes > 1) prefetch<Lanes, 2>(from, first);
}

/// The elements of a run of channel `c`: where they are if possible, else copied to `buffer`.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] A const* fetch_run(tensor_view<T const> const& x, std::int64_t c, groups::piece const& at, A* buffer) {
  T const* const from = &x(at.sample, c, at.begin);
  if (x.stride_s == 1) {
    if constexpr (std::is_same_v<A, T>)
      return from;
    else
      for_each_lanes<native_lanes<A>>(at.length,
                                      [&]<int L>(std::int64_t i) { store<L>(buffer + i, load<L>(from + i)); });
  } else {
    for (std::int64_t i = 0; i < at.length; ++i) buffer[i] = to_accumulate(from[i * x.stride_s]);
  }
  return buffer;
}

/// Where to write a run of channel `c`: its place if possible, else `buffer`, from which `finish_run` copies.
template <class T, class A = accumulate_t<T>>
[[nodiscard]] A* place_run(tensor_view<T> const& y, std::int64_t c, groups::piece const& at, A* buffer,
                           power_stores const& how) {
  if constexpr (std::is_same_v<A, T>)
    if (y.stride_s == 1 && (how.whole_lines || !how.streams)) return &y(at.sample, c, at.begin);
  return buffer;
}

template <class T, class A = accumulate_t<T>>
void finish_run(tensor_view<T> const& y, std::int64_t c, groups::piece const& at, A const* written, A const* buffer,
                power_stores const& how) {
  if (written != buffer) return;
  T* const to = &y(at.sample, c, at.begin);
  if (y.stride_s == 1)
    for_each_lanes_of<native_lanes<A>>(
        to, at.length, how, [&]<int L>(std::int64_t i, bool streams) { put<L>(to + i, load<L>(buffer + i), streams); });
  else
    for (std::int64_t i = 0; i < at.length; ++i) to[i * y.stride_s] = from_accumulate<T>(buffer[i]);
}

/// Sums over vectors of `L` lanes and over what is left.
template <class A, int L>
struct lane_sum {
  vector_t<A, L> wide{};
  A single = 0;

  template <int Lanes>
  void add(vector_t<A, Lanes> const& v) {
    if constexpr (Lanes == L && L > 1)
      wide += v;
    else
      single += v;
  }
  [[nodiscard]] A total() const { return sum_lanes<A, L>(wide) + single; }
};

/// v where `keep` is not zero, else 0; a NaN that is not kept leaves no trace.
template <class A, int L>
[[nodiscard]] inline vector_t<A, L> kept(vector_t<A, L> const& keep, vector_t<A, L> const& v) {
  vector_t<A, L> const zero{};
  return keep != zero ? v : zero;
}

/// Adds A's `n` sums of a piece to those in double.
template <class A>
void add_to(double* sums, A const* piece, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) sums[i] += static_cast<double>(piece[i]);
}

/// The sum over a group's `width` channels at one position, in `A` over some of them and of these in double:
/// add.template operator()<L>(i, sum) adds lanes from channel i of the group on.
template <class A, class Add>
[[nodiscard]] A sum_of_width(std::int64_t width, Add const& add) {
  constexpr int lanes = native_lanes<A>;
  double all = 0;
  for (std::int64_t first = 0; first < width; first += longest_sum * lanes) {
    lane_sum<A, lanes> some;
    for_each_lanes<lanes>(std::min(longest_sum * lanes, width - first),
                          [&]<int L>(std::int64_t i) { add.template operator()<L>(first + i, some); });
    all += static_cast<double>(some.total());
  }
  return static_cast<A>(all);
}

/// The same at each of `length` positions of a run: add(i) adds channel i of the group to `sums`.
template <class A, class Add>
void sum_of_width(std::int64_t width, std::int64_t length, A* sums, Add const& add) {
  run_buffer<double> all;
  std::fill_n(all.data(), length, 0.0);
  std::fill_n(sums, length, A{0});
  for (std::int64_t i = 0; i < width; ++i) {
    add(i);
    if (i + 1 < width && (i + 1) % longest_sum != 0) continue;
    add_to(all.data(), sums, length);
    std::fill_n(sums, length, A{0});
  }
  for (std::int64_t i = 0; i < length; ++i) sums[i] = static_cast<A>(all[static_cast<std::size_t>(i)]);
}

/// The factor of each position of a run, for the group of channels that begins with `begin`.
template <class T, class A = accumulate_t<T>>
void find_roots(tensor_view<T const> const& x, channel_groups const& scaling, groups::piece const& at,
                std::int64_t begin, A* root, A* x_copy) {
  sum_of_width(scaling.width, at.length, root, [&](std::int64_t i) {
    A const* const from = fetch_run(x, begin + i, at, x_copy);
    for_each_lanes<native_lanes<A>>(at.length, [&]<int L>(std::int64_t s) {
      auto const v = load<L>(from + s);
      store<L>(root + s, load<L>(root + s) + v * v);
    });
  });
  for (std::int64_t s = 0; s < at.length; ++s) root[s] = scaling.template inverse_root<A>(root[s]);
}

/// Two sums for each of some channels, in `A` over some hundred positions, and of these in double.
template <class A>
class position_sums {
public:
  /// `channels` 0: none.
  position_sums(std::int64_t channels, double* first, double* second)
      : scratch_{2 * channels}, channels_{channels}, first_{first}, second_{second} {
    std::fill_n(scratch_.data(), 2 * channels, A{0});
  }

  [[nodiscard]] A* first() { return scratch_.data(); }
  [[nodiscard]] A* second() { return scratch_.data() + channels_; }

  /// After each position.
  void next() {
    if (++count_ == most) finish();
  }
  void finish() {
    add_to(first_, first(), channels_);
    add_to(second_, second(), channels_);
    std::fill_n(scratch_.data(), 2 * channels_, A{0});
    count_ = 0;
  }

private:
  static constexpr int most = 256;

  scratch_lease<A> scratch_;
  std::int64_t channels_;
  double *first_, *second_;
  int count_ = 0;
};

/// Channels that a task of power norm takes: whole groups, and a page of contiguous channels or some rows.
template <class T>
[[nodiscard]] std::int64_t power_chunk(tensor_view<T> const& x, layout order, channel_groups const& scaling) {
  auto const unit = std::max<std::int64_t>(1, scaling.width);
  auto const wanted =
      order == layout::channels ? chunk_channels<accumulate_t<std::remove_const_t<T>>> : reduction_chunk(x);
  return std::max<std::int64_t>(1, wanted / unit) * unit;
}

/// Runs kernel(first, length, group, a, b) for every chunk of channels and group of pieces, and sums a and b over the
/// groups, in order. `Sums`: whether there are any.
template <bool Sums, class Kernel>
void run_power(executor_ref exec, groups const& parts, std::int64_t channels, std::int64_t chunk, Kernel const& kernel,
               std::span<double> out_a, std::span<double> out_b) {
  if constexpr (Sums) {
    std::ranges::fill(out_a, 0.0);
    std::ranges::fill(out_b, 0.0);
  }
  if (channels == 0 || parts.count == 0) return;
  std::int64_t const chunks = ceil_div(channels, chunk), width = 2 * channels;
  scratch_lease<double> partials{Sums ? parts.count * width : 0};
  double* const all = partials.data();
  exec.for_each(chunks * parts.count, [&](std::int64_t i) {
    std::int64_t const g = i / chunks, first = i % chunks * chunk, length = std::min(chunk, channels - first);
    double* const a = Sums ? all + g * width + first : nullptr;
    double* const b = Sums ? a + channels : nullptr;
    if constexpr (Sums) {
      std::fill_n(a, length, 0.0);
      std::fill_n(b, length, 0.0);
    }
    kernel(first, length, g, a, b);
    stream_fence();
  });
  if constexpr (Sums)
    for (std::int64_t g = 0; g < parts.count; ++g) {
      add_to(out_a.data(), all + g * width, channels);
      add_to(out_b.data(), all + g * width + channels, channels);
    }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
