#pragma once

#include <algorithm>
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
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

// Primitives of complex numbers in any layout, which are not those of real channels: for a complex gamma, which makes of each component a
// sum of both, and where components of a channel do not lie as those of real channels can.
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

/// mean = Σ x / n and, for real and imaginary parts by themselves, m2 = Σ (x − mean)², over the `count` positions that count, by two passes
/// in double. Elements that are all equal have exactly their mean, and no m2. Shapes: `[N, C, S]`, and `[C, 2]`. The same bits whatever the
/// executor. Local.
template <class Z>
void complex_moments(executor_ref exec, tensor_view<Z> const& x, mask_view const& mask, std::int64_t count,
                     std::span<double> mean, std::span<double> m2) {
  using T = typename std::remove_const_t<Z>::value_type;
  std::ranges::fill(mean, 0.0);
  std::ranges::fill(m2, 0.0);
  if (count == 0) return;
  bool const positions = detail::goes_by_positions(x);
  std::int64_t first_counted = 0;
  while (mask && !mask(first_counted / x.spatial, first_counted % x.spatial)) ++first_counted;
  detail::for_each_part_of_channels(exec, x, [&](std::int64_t first, std::int64_t channels) {
    auto const of_x = x.channel_range(first, channels);
    // From one of the elements on, and then from their mean, which that of what is left makes good.
    detail::component_table<double, 1> pivots{channels};
    auto const add_to_mean = [&](auto const& sums) {
      for (std::int64_t c = 0; c < channels; ++c) {
        auto const at = static_cast<std::size_t>(2 * (first + c));
        auto const more = sums.of(0, c);
        for (std::size_t i = 0; i < 2; ++i) mean[at + i] += more[i] / static_cast<double>(count);
        pivots.set(c, {std::complex{mean[at], mean[at + 1]}});
      }
    };
    auto const sum = [&]<std::size_t Count>(detail::lane_sums<Count>& sums) {
      auto const add = [&](detail::number_run const& run) {
        if (!run.counts) return;
        auto const* const from = reinterpret_cast<T const*>(&of_x(run.sample, run.channel, run.position));
        pivots.with(
            run, positions, [&](auto const& k) __attribute__((always_inline)) {
              sums.add(
                  run, [&]<int L>(std::int64_t i, auto& of) __attribute__((always_inline)) {
                    detail::vector_t<double, L> const d = detail::load_wide<L>(from + i) - k.template get<L>(0, i);
                    of[0] += d;
                    if constexpr (Count > 1) of[1] = detail::multiply_add(d, d, of[1]);
                  });
            });
      };
      detail::for_each_run(positions, 0, of_x.size(), mask, add, of_x);
    };
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const at = static_cast<std::size_t>(2 * (first + c));
      std::complex<double> const pivot{of_x(first_counted / x.spatial, c, first_counted % x.spatial)};
      mean[at] = pivot.real();
      mean[at + 1] = pivot.imag();
      pivots.set(c, {pivot});
    }
    detail::lane_sums<1> from_pivot{channels, positions};
    sum(from_pivot);
    add_to_mean(from_pivot);
    detail::lane_sums<2> from_mean{channels, positions};
    sum(from_mean);
    add_to_mean(from_mean);
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const left = from_mean.of(0, c), squares = from_mean.of(1, c);
      for (std::size_t i = 0; i < 2; ++i) {
        double const spread = squares[i] - left[i] * (left[i] / static_cast<double>(count));
        m2[static_cast<std::size_t>(2 * (first + c)) + i] = spread < 0 ? 0.0 : spread; // by rounding
      }
    }
  });
}

/// y = (x − center)·scale + shift, by the coefficients `terms(channel)`. `turns`: scales are complex; else what is not finite in one part
/// of a number leaves the other as it is. Shapes: `[N, C, S]`; y may be x. Local.
template <complex_component T, class Terms>
void normalize_complex(executor_ref exec, std::type_identity_t<tensor_view<std::complex<T> const>> x,
                       tensor_view<std::complex<T>> y, Terms const& terms, bool turns, batch_norm_mask const& mask,
                       stores how = stores::automatic) {
  if (how == stores::automatic) how = stores_for(y);
  bool const zeroes = mask.masked == masked_outputs::zero, positions = detail::goes_by_positions(y, x);
  detail::component_table<T, 4> table{y.channels};
  for (std::int64_t c = 0; c < y.channels; ++c) {
    complex_normalize_coefficients<T> const k = terms(c);
    auto const [real, imag] = detail::factor_by_lanes(k.scale);
    table.set(c, {k.center, real, imag, k.shift});
  }
  auto const map = [&](detail::number_run const& run) {
    auto const* const from = reinterpret_cast<T const*>(&x(run.sample, run.channel, run.position));
    auto* const to = reinterpret_cast<T*>(&y(run.sample, run.channel, run.position));
    if (!run.counts && zeroes) return static_cast<void>(std::fill_n(to, 2 * run.numbers, T{0}));
    table.with(
        run, positions, [&](auto const& k) __attribute__((always_inline)) {
          std::int64_t const n = 2 * run.numbers;
          detail::for_each_numbers_written(
              to, n,
              detail::may_stream(to, n, how), [&]<int L, bool Stream>(std::int64_t i) __attribute__((always_inline)) {
                using vector = detail::vector_t<T, L>;
                vector const d = detail::load<L>(from + i) - k.template get<L>(0, i);
                vector const real = k.template get<L>(1, i), shift = k.template get<L>(3, i);
                detail::write<Stream, L>(to + i, turns ? detail::times<T, L>(d, real, k.template get<L>(2, i)) + shift
                                                       : detail::multiply_add<vector>(d, real, shift));
              });
        });
  };
  detail::for_each_part(exec, y, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(positions, first, last, mask.mask, map, y, x);
  });
}

/// Σ dy and Σ dy·conj(x − mean) over the positions whose outputs are not zeroed, in double. Shapes: `[N, C, S]`, and `[C, 2]`, real and
/// imaginary parts. The same bits whatever the executor. Local.
template <complex_component T>
void backward_reduce_complex(executor_ref exec, tensor_view<std::complex<T> const> dy,
                             std::type_identity_t<tensor_view<std::complex<T> const>> x, std::span<double const> mean,
                             batch_norm_mask const& mask, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  bool const zeroes = mask.masked == masked_outputs::zero, positions = detail::goes_by_positions(dy, x);
  detail::for_each_part_of_channels(exec, dy, [&](std::int64_t first, std::int64_t channels) {
    auto const of_dy = dy.channel_range(first, channels), of_x = x.channel_range(first, channels);
    detail::component_table<double, 1> means{channels};
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const at = static_cast<std::size_t>(2 * (first + c));
      means.set(c, {std::complex{mean[at], mean[at + 1]}});
    }
    detail::lane_sums<3> sums{channels, positions};
    auto const add = [&](detail::number_run const& run) {
      if (!run.counts && zeroes) return;
      auto const* const from_dy = reinterpret_cast<T const*>(&of_dy(run.sample, run.channel, run.position));
      auto const* const from_x = reinterpret_cast<T const*>(&of_x(run.sample, run.channel, run.position));
      means.with(
          run, positions, [&](auto const& k) __attribute__((always_inline)) {
            sums.add(
                run, [&]<int L>(std::int64_t i, auto& of) __attribute__((always_inline)) {
                  using vector = detail::vector_t<double, L>;
                  vector const g = detail::load_wide<L>(from_dy + i);
                  vector const d = detail::load_wide<L>(from_x + i) - k.template get<L>(0, i);
                  of[0] += g;
                  of[1] = detail::multiply_add<vector>(g, d, of[1]);
                  of[2] = detail::multiply_add<vector>(g, detail::exchanged<double, L>(d), of[2]);
                });
          });
    };
    detail::for_each_run(positions, 0, of_dy.size(), mask.mask, add, of_dy, of_x);
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const at = static_cast<std::size_t>(2 * (first + c));
      auto const of_gradient = sums.of(0, c), products = sums.of(1, c), crossed = sums.of(2, c);
      sum_dy[at] = of_gradient[0];
      sum_dy[at + 1] = of_gradient[1];
      sum_dy_xmu[at] = products[0] + products[1];
      sum_dy_xmu[at + 1] = crossed[1] - crossed[0];
    }
  });
}

/// dx = dy·dy_scale, and where positions count + (x − center)·x_scale + shift, by the coefficients `terms(channel)`; `constant`: the
/// first term alone, whatever x is; `turns` as of `normalize_complex`. Shapes: `[N, C, S]`; dx may be dy or x. Local.
template <complex_component T, class Terms>
void backward_elemt_complex(executor_ref exec, std::type_identity_t<tensor_view<std::complex<T> const>> dy,
                            std::type_identity_t<tensor_view<std::complex<T> const>> x, tensor_view<std::complex<T>> dx,
                            Terms const& terms, bool turns, bool constant, batch_norm_mask const& mask,
                            stores how = stores::automatic) {
  if (how == stores::automatic) how = stores_for(dx);
  bool const zeroes = mask.masked == masked_outputs::zero, positions = detail::goes_by_positions(dx, dy, x);
  detail::component_table<T, 5> table{dx.channels};
  for (std::int64_t c = 0; c < dx.channels; ++c) {
    complex_backward_coefficients<T> const k = terms(c);
    auto const [real, imag] = detail::factor_by_lanes(k.dy_scale);
    table.set(c, {real, imag, k.center, {k.x_scale, k.x_scale}, k.shift});
  }
  auto const map = [&](detail::number_run const& run) {
    auto const* const of_dy = reinterpret_cast<T const*>(&dy(run.sample, run.channel, run.position));
    auto const* const of_x = reinterpret_cast<T const*>(&x(run.sample, run.channel, run.position));
    auto* const to = reinterpret_cast<T*>(&dx(run.sample, run.channel, run.position));
    if (!run.counts && zeroes) return static_cast<void>(std::fill_n(to, 2 * run.numbers, T{0}));
    bool const alone = !run.counts || constant;
    table.with(
        run, positions, [&](auto const& k) __attribute__((always_inline)) {
          std::int64_t const n = 2 * run.numbers;
          detail::for_each_numbers_written(
              to, n,
              detail::may_stream(to, n, how), [&]<int L, bool Stream>(std::int64_t i) __attribute__((always_inline)) {
                using vector = detail::vector_t<T, L>;
                vector const g = detail::load<L>(of_dy + i), real = k.template get<L>(0, i);
                auto const scaled = [&](vector const& more) __attribute__((always_inline)) {
                  return turns ? detail::times<T, L>(g, real, k.template get<L>(1, i)) + more
                               : detail::multiply_add<vector>(g, real, more);
                };
                if (alone) return detail::write<Stream, L>(to + i, scaled(vector{}));
                vector const d = detail::load<L>(of_x + i) - k.template get<L>(2, i);
                detail::write<Stream, L>(
                    to + i, detail::multiply_add<vector>(d, k.template get<L>(3, i), scaled(k.template get<L>(4, i))));
              });
        });
  };
  detail::for_each_part(exec, dx, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(positions, first, last, mask.mask, map, dx, dy, x);
  });
}

} // namespace syncnorm::host
