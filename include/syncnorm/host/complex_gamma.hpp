#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/complex_lanes.hpp>
#include <syncnorm/host/detail/partition.hpp>
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
