#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>

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

/// Coefficients by lanes: of channel after channel, or of one repeated.
template <class T, std::size_t Count>
class component_table {
public:
  explicit component_table(std::int64_t channels)
      : repeats_{channels == 1}, step_{std::max<std::int64_t>(2 * channels, native_lanes<T>)},
        memory_{static_cast<std::int64_t>(Count) * step_} {}

  void set(std::int64_t channel, std::array<std::complex<T>, Count> const& values) {
    for (std::int64_t lane = 2 * channel; lane < (repeats_ ? step_ : 2 * channel + 2); lane += 2)
      for (std::size_t j = 0; j < Count; ++j) {
        T* const at = memory_.data() + static_cast<std::int64_t>(j) * step_ + lane;
        at[0] = values[j].real();
        at[1] = values[j].imag();
      }
  }
  /// Coefficient j of the lanes from `i` on.
  template <int L>
  [[nodiscard, gnu::always_inline]] vector_t<T, L> get(std::int64_t j, std::int64_t i) const {
    return load<L>(memory_.data() + j * step_ + (repeats_ ? 0 : i));
  }

private:
  bool repeats_;
  std::int64_t step_;
  scratch_lease<T> memory_;
};

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

/// Calls f(sample, position, positions, whether they count) for positions [first, last) of all samples, one after the other: at once for those
/// of a row, where numbers of one channel follow each other in all of `tensors` and there is no mask.
template <class F, class X, class... View>
void for_each_run(std::int64_t first, std::int64_t last, mask_view const& mask, F const& f, X const& x,
                  View const&... others) {
  bool const rows = x.channels == 1 && !mask && x.stride_s == 1 && (... && (others.stride_s == 1));
  for (std::int64_t n = first / x.spatial, s = first % x.spatial; first < last; ++n, s = 0)
    while (s < x.spatial && first < last) {
      std::int64_t const some = rows ? std::min(x.spatial - s, last - first) : 1;
      f(n, s, some, !mask || mask(n, s));
      s += some;
      first += some;
    }
}

/// Calls f(first, last) for parts of the positions of all samples, possibly at the same time.
template <class T, class F>
void for_each_part(executor_ref exec, tensor_view<T> const& x, F const& f) {
  constexpr std::int64_t numbers_of_part = 16384;
  if (x.size() == 0) return;
  std::int64_t const part = std::max<std::int64_t>(1, numbers_of_part / x.channels);
  exec.for_each(ceil_div(x.count(), part), [&](std::int64_t i) { f(i * part, std::min(x.count(), (i + 1) * part)); });
}

/// Σ dy, Σ dy·(x − mean) and Σ dy·exchanged(x − mean) of each lane of some channels, in double.
template <class T>
class lane_sums {
public:
  static constexpr std::int64_t most_channels = 256;

  /// Adds a run of numbers of all the channels, whose means are `mean`, or of the only one.
  [[gnu::always_inline]] void add(T const* dy, T const* x, std::int64_t n, double const* mean, bool repeats) {
    for_each_numbers<native_lanes<double>>(n, [&]<int L>(std::int64_t i) {
      using vector = vector_t<double, L>;
      std::int64_t const at = repeats ? 0 : i;
      auto const g = __builtin_convertvector(load<L>(dy + i), vector);
      vector const d = __builtin_convertvector(load<L>(x + i), vector) - load<L>(mean + at);
      auto const put = [&](std::size_t which, auto const& more) __attribute__((always_inline)) {
        double* const to = sums_[which].data() + at;
        store<L>(to, more(load<L>(to)));
      };
      put(0, [&](vector const& sum) { return sum + g; });
      put(1, [&](vector const& sum) { return multiply_add<vector>(g, d, sum); });
      put(2, [&](vector const& sum) { return multiply_add<vector>(g, exchanged<double, L>(d), sum); });
    });
  }
  /// Real and imaginary parts of Σ dy and Σ dy·conj(x − mean) of so many channels.
  void finish(std::int64_t channels, double* sum_dy, double* sum_dy_xmu) const {
    std::int64_t const period = 2 * channels, lanes = channels == 1 ? native_lanes<double> : period;
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      auto const i = static_cast<std::size_t>(lane);
      std::int64_t const to = lane % period, number = to / 2 * 2;
      sum_dy[to] += sums_[0][i];
      sum_dy_xmu[number] += sums_[1][i];
      sum_dy_xmu[number + 1] += to % 2 == 0 ? -sums_[2][i] : sums_[2][i];
    }
  }

private:
  std::array<std::array<double, 2 * most_channels>, 3> sums_{};
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
