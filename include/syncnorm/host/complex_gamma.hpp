#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>

// Passes over complex numbers whose gamma is complex, which makes of each component a sum of both: no map of real channels does that.
namespace syncnorm::host {

/// One channel of y = (x − center)·scale + shift.
template <complex_component T>
struct complex_normalize_coefficients {
  std::complex<T> center, scale, shift;
};

/// One channel of dx = dy·dy_scale + (x − center)·x_scale + shift, of which positions that do not count have the first term alone, and all
/// have where statistics are constant.
template <complex_component T>
struct complex_backward_coefficients {
  std::complex<T> dy_scale, center, shift;
  T x_scale;
};

namespace detail {

/// a·b without the care that std::complex takes of infinities.
template <class T>
[[nodiscard]] constexpr std::complex<T> product(std::complex<T> a, std::complex<T> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

/// What a number in double loses as one of type `T`.
template <class T>
[[nodiscard]] constexpr std::complex<double> lost_of(std::complex<double> value) {
  return value - std::complex<double>{std::complex<T>{value}};
}

inline namespace SYNCNORM_VECTORS {

/// Numbers in lanes, real part and imaginary part in turn, each with the two exchanged.
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

} // namespace SYNCNORM_VECTORS

} // namespace detail

/// The coefficients of a channel whose numbers are multiplied by gamma·inv_std.
template <complex_component T>
[[nodiscard]] complex_normalize_coefficients<T>
make_complex_normalize_coefficients(std::complex<double> mean, double inv_std, std::complex<double> gamma,
                                    std::complex<double> beta) {
  auto const scale = gamma * inv_std;
  auto const shift = beta - detail::product(detail::lost_of<T>(mean), scale);
  return {std::complex<T>{mean}, std::complex<T>{scale}, std::complex<T>{shift}};
}

/// The coefficients of a channel by the sums over all ranks; `sum_dy_xmu`: Σ dy·conj(x − mean). A count of 0: by constant statistics.
template <complex_component T>
[[nodiscard]] complex_backward_coefficients<T>
make_complex_backward_coefficients(std::complex<double> mean, double inv_std, std::complex<double> gamma,
                                   std::complex<double> sum_dy, std::complex<double> sum_dy_xmu,
                                   normalized_count count) {
  // Those of a real channel by the gradient of (x − mean)·inv_std, which is dy·conj(gamma).
  auto const turned = std::conj(gamma) * inv_std;
  if (count.n == 0) return {std::complex<T>{turned}, std::complex<T>{mean}, {}, T{0}};
  double const along = detail::product(turned, sum_dy_xmu).real();
  double const x_scale = -(inv_std / static_cast<double>(count.degrees_of_freedom())) * (inv_std * along);
  auto const shift =
      -detail::product(turned, sum_dy) / static_cast<double>(count.n) - detail::lost_of<T>(mean) * x_scale;
  return {std::complex<T>{turned}, std::complex<T>{mean}, std::complex<T>{shift}, static_cast<T>(x_scale)};
}

/// y = (x − center)·scale + shift, by the coefficients `terms(channel)`. Shapes: `[N, C, S]`, of one channel or of contiguous ones; y may be x.
/// Local.
template <complex_component T, class Terms>
void normalize_complex(executor_ref exec, std::type_identity_t<tensor_view<std::complex<T> const>> x,
                       tensor_view<std::complex<T>> y, Terms const& terms, batch_norm_mask const& mask) {
  bool const zeroes = mask.masked == masked_outputs::zero;
  detail::component_table<T, 4> table{y.channels};
  for (std::int64_t c = 0; c < y.channels; ++c) {
    complex_normalize_coefficients<T> const k = terms(c);
    auto const [real, imag] = detail::factor_by_lanes(k.scale);
    table.set(c, {k.center, real, imag, k.shift});
  }
  detail::for_each_part(exec, y, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(
        first, last, mask.mask,
        [&](std::int64_t n, std::int64_t s, std::int64_t positions, bool counts) {
          auto const* const from = reinterpret_cast<T const*>(&x(n, 0, s));
          auto* const to = reinterpret_cast<T*>(&y(n, 0, s));
          std::int64_t const lanes = 2 * positions * y.channels;
          if (!counts && zeroes) return static_cast<void>(std::fill_n(to, lanes, T{0}));
          detail::for_each_numbers<detail::native_lanes<T>>(lanes, [&]<int L>(std::int64_t i) {
            detail::vector_t<T, L> const d = detail::load<L>(from + i) - table.template get<L>(0, i);
            detail::store<L>(to + i, detail::times<T, L>(d, table.template get<L>(1, i), table.template get<L>(2, i)) +
                                         table.template get<L>(3, i));
          });
        },
        y, x);
  });
}

/// Σ dy and Σ dy·conj(x − mean) over the positions whose outputs are not zeroed, in double. Shapes: `[N, C, S]`, of one channel or of
/// contiguous ones, and `[C, 2]`, real and imaginary parts. The same bits whatever the executor. Local.
template <complex_component T>
void backward_reduce_complex(executor_ref exec, tensor_view<std::complex<T> const> dy,
                             std::type_identity_t<tensor_view<std::complex<T> const>> x, std::span<double const> mean,
                             batch_norm_mask const& mask, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  using sums_type = detail::lane_sums<T>;
  bool const zeroes = mask.masked == masked_outputs::zero;
  std::ranges::fill(sum_dy, 0.0);
  std::ranges::fill(sum_dy_xmu, 0.0);
  if (dy.size() == 0) return;
  std::int64_t const share = detail::ceil_div(dy.channels, exec.concurrency()),
                     part = std::min(share, sums_type::most_channels);
  exec.for_each(detail::ceil_div(dy.channels, part), [&](std::int64_t i) {
    std::int64_t const begin = i * part, channels = std::min(dy.channels - begin, part);
    auto const dy_part = dy.channel_range(begin, channels), x_part = x.channel_range(begin, channels);
    std::array<double, static_cast<std::size_t>(2 * sums_type::most_channels)> means;
    bool const repeats = channels == 1;
    for (std::size_t lane = 0; lane < means.size(); ++lane)
      means[lane] = mean[static_cast<std::size_t>(2 * begin) + lane % static_cast<std::size_t>(2 * channels)];
    sums_type sums;
    detail::for_each_run(
        0, dy.count(), mask.mask,
        [&](std::int64_t n, std::int64_t s, std::int64_t positions, bool counts) {
          if (counts || !zeroes)
            sums.add(reinterpret_cast<T const*>(&dy_part(n, 0, s)), reinterpret_cast<T const*>(&x_part(n, 0, s)),
                     2 * positions * channels, means.data(), repeats);
        },
        dy_part, x_part);
    sums.finish(channels, sum_dy.data() + 2 * begin, sum_dy_xmu.data() + 2 * begin);
  });
}

/// dx = dy·dy_scale, and where positions count + (x − center)·x_scale + shift, by the coefficients `terms(channel)`; `constant`: the first term
/// alone, whatever x is. Shapes: `[N, C, S]`, of one channel or of contiguous ones; dx may be dy or x. Local.
template <complex_component T, class Terms>
void backward_elemt_complex(executor_ref exec, std::type_identity_t<tensor_view<std::complex<T> const>> dy,
                            std::type_identity_t<tensor_view<std::complex<T> const>> x, tensor_view<std::complex<T>> dx,
                            Terms const& terms, bool constant, batch_norm_mask const& mask) {
  bool const zeroes = mask.masked == masked_outputs::zero;
  detail::component_table<T, 5> table{dx.channels};
  for (std::int64_t c = 0; c < dx.channels; ++c) {
    complex_backward_coefficients<T> const k = terms(c);
    auto const [real, imag] = detail::factor_by_lanes(k.dy_scale);
    table.set(c, {real, imag, k.center, {k.x_scale, k.x_scale}, k.shift});
  }
  detail::for_each_part(exec, dx, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(
        first, last, mask.mask,
        [&](std::int64_t n, std::int64_t s, std::int64_t positions, bool counts) {
          auto const* const of_dy = reinterpret_cast<T const*>(&dy(n, 0, s));
          auto const* const of_x = reinterpret_cast<T const*>(&x(n, 0, s));
          auto* const to = reinterpret_cast<T*>(&dx(n, 0, s));
          std::int64_t const lanes = 2 * positions * dx.channels;
          if (!counts && zeroes) return static_cast<void>(std::fill_n(to, lanes, T{0}));
          bool const alone = !counts || constant;
          detail::for_each_numbers<detail::native_lanes<T>>(lanes, [&]<int L>(std::int64_t i) {
            using vector = detail::vector_t<T, L>;
            vector const turned = detail::times<T, L>(detail::load<L>(of_dy + i), table.template get<L>(0, i),
                                                      table.template get<L>(1, i));
            if (alone) return detail::store<L>(to + i, turned);
            vector const d = detail::load<L>(of_x + i) - table.template get<L>(2, i);
            detail::store<L>(to + i, detail::multiply_add<vector>(d, table.template get<L>(3, i),
                                                                  turned + table.template get<L>(4, i)));
          });
        },
        dx, dy, x);
  });
}

} // namespace syncnorm::host
