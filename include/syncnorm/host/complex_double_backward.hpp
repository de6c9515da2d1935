#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/complex_second_order.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/complex_numbers.hpp>
#include <syncnorm/host/detail/complex_lanes.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// What a double backward pass over one batch of complex numbers reads and writes, `[N, C, S]`; names as in
/// `complex_batch_norm_double_backward`. Without data, u is 0, and to_dy and to_x not needed.
template <complex_component T>
struct complex_second_order_operands {
  tensor_view<std::complex<T> const> dy, x, u;
  tensor_view<std::complex<T>> to_dy, to_x;
  batch_norm_mask mask;
  bool turns; ///< gamma is complex; else no part of a number is made of the other
};

/// Sums of a batch's channels, `[C, 2]` each: Σ w·dy, Σ w·dy·conj(x − mean), Σ m·u, Re Σ m·u·conj(x − mean), and Σ w·dy·conj(u); of these
/// products the real parts alone unless gamma turns.
struct complex_double_backward_sums {
  std::span<double> dy, dy_xmu, u, u_xmu, dy_u;
};

namespace detail {

/// Σ p·conj(q), of the sums of lanes p·q and of p times q with its parts exchanged.
[[nodiscard]] inline std::complex<double> sum_of_conjugates(std::array<double, 2> const& products,
                                                            std::array<double, 2> const& crossed) {
  return {products[0] + products[1], crossed[1] - crossed[0]};
}

/// to + value·scale, unless that is 0, which may meet anything.
template <class T, int L>
[[nodiscard, gnu::always_inline]] inline vector_t<T, L> add_given(vector_t<T, L> const& to, vector_t<T, L> const& value,
                                                                  vector_t<T, L> const& real) {
  return real == vector_t<T, L>{} ? to : multiply_add<vector_t<T, L>>(value, real, to);
}
template <class T, int L>
[[nodiscard, gnu::always_inline]] inline vector_t<T, L> add_given(vector_t<T, L> const& to, vector_t<T, L> const& value,
                                                                  vector_t<T, L> const& real,
                                                                  vector_t<T, L> const& imag, bool turns) {
  auto const sum = add_given<T, L>(to, value, real);
  return turns ? add_given<T, L>(sum, exchanged<T, L>(value), imag) : sum;
}

} // namespace detail

/// The sums of a double backward pass, in double. The same bits whatever the executor. Local.
template <complex_component T>
void double_backward_reduce_complex(executor_ref exec, complex_second_order_operands<T> const& of,
                                    std::span<double const> mean, complex_double_backward_sums const& to) {
  bool const zeroes = of.mask.masked == masked_outputs::zero, has_u = of.u.data != nullptr;
  auto const& u_or_dy = has_u ? of.u : of.dy;
  bool const positions = detail::goes_by_positions(of.dy, of.x, u_or_dy);
  detail::for_each_part_of_channels(exec, of.x, [&](std::int64_t first, std::int64_t channels) {
    auto const dy = of.dy.channel_range(first, channels), x = of.x.channel_range(first, channels);
    auto const u = u_or_dy.channel_range(first, channels);
    detail::component_table<double, 1> means{channels};
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const at = static_cast<std::size_t>(2 * (first + c));
      means.set(c, {std::complex{mean[at], mean[at + 1]}});
    }
    detail::lane_sums<7> sums{channels, positions};
    auto const add = [&](detail::number_run const& run) {
      if (!run.counts && zeroes) return;
      auto const* const from_dy = reinterpret_cast<T const*>(&dy(run.sample, run.channel, run.position));
      auto const* const from_x = reinterpret_cast<T const*>(&x(run.sample, run.channel, run.position));
      auto const* const from_u = reinterpret_cast<T const*>(&u(run.sample, run.channel, run.position));
      means.with(
          run, positions, [&](auto const& k) __attribute__((always_inline)) {
            sums.add(
                run, [&]<int L>(std::int64_t i, auto& all) __attribute__((always_inline)) {
                  using vector = detail::vector_t<double, L>;
                  auto const product = [&](std::size_t j, vector const& a, vector const& b)
                      __attribute__((always_inline)) {
                    all[j] = detail::multiply_add<vector>(a, b, all[j]);
                  };
                  vector const g = detail::load_wide<L>(from_dy + i);
                  vector const d = detail::load_wide<L>(from_x + i) - k.template get<L>(0, i);
                  all[0] += g;
                  product(1, g, d);
                  if (of.turns) product(2, g, detail::exchanged<double, L>(d));
                  if (!has_u) return;
                  vector const v = detail::load_wide<L>(from_u + i);
                  product(3, g, v);
                  if (of.turns) product(4, g, detail::exchanged<double, L>(v));
                  if (!run.counts) return;
                  all[5] += v;
                  product(6, v, d);
                });
          });
    };
    detail::for_each_run(positions, 0, x.size(), of.mask.mask, add, dy, x, u);
    for (std::int64_t c = 0; c < channels; ++c) {
      auto const set = [&](std::span<double> values, std::complex<double> value) {
        auto const at = static_cast<std::size_t>(2 * (first + c));
        values[at] = value.real(), values[at + 1] = value.imag();
      };
      auto const sum = [&](std::size_t j) { return sums.of(j, c); };
      set(to.dy, {sum(0)[0], sum(0)[1]});
      set(to.dy_xmu, detail::sum_of_conjugates(sum(1), sum(2)));
      set(to.dy_u, detail::sum_of_conjugates(sum(3), sum(4)));
      set(to.u, {sum(5)[0], sum(5)[1]});
      set(to.u_xmu, {sum(6)[0] + sum(6)[1], 0});
    }
  });
}

/// to_dy = w·(u·u_scale + (x − mean)·x_scale + shift) and to_x = w·dy·dy_scale + m·(u·u_scale + (x − mean)·x_scale + shift) by the
/// coefficients `terms(channel)`, and `mean`, `[C, 2]`. What a scale of 0 meets may be anything. Local.
template <complex_component T, class Terms>
void double_backward_elemt_complex(executor_ref exec, complex_second_order_operands<T> const& of,
                                   std::span<double const> mean, Terms const& terms, stores how = stores::automatic) {
  if (how == stores::automatic) how = stores_for(of.x);
  bool const has_dy = of.to_dy.data != nullptr, has_x = of.to_x.data != nullptr;
  if (!has_dy && !has_x) return;
  bool const zeroes = of.mask.masked == masked_outputs::zero;
  // What is written in any case, and what is read in any case, stand in for what there is not.
  auto const& u = of.u.data != nullptr ? of.u : of.dy;
  auto const &to_dy = has_dy ? of.to_dy : of.to_x, &to_x = has_x ? of.to_x : of.to_dy;
  bool const positions = detail::goes_by_positions(of.dy, of.x, u, to_dy, to_x);
  detail::component_table<T, 11> table{of.x.channels};
  for (std::int64_t c = 0; c < of.x.channels; ++c) {
    auto const at = static_cast<std::size_t>(2 * c);
    std::complex<double> const center{mean[at], mean[at + 1]};
    auto const lost = detail::lost_of<T>(center);
    complex_second_order_coefficients const k = terms(c);
    auto const number = [](complex_value v) { return std::complex<T>{static_cast<T>(v.re), static_cast<T>(v.im)}; };
    auto const both = [](double v) { return std::complex<T>{static_cast<T>(v), static_cast<T>(v)}; };
    complex_value const of_lost{lost.real(), lost.imag()};
    bool const has_u = of.u.data != nullptr; // else its scales are 0
    auto const [dy_u, dy_u_imag] = detail::factor_by_lanes(number(has_u ? k.for_dy.u_scale : complex_value{}));
    auto const [dy_x, dy_x_imag] = detail::factor_by_lanes(number(k.for_dy.x_scale));
    auto const [x_dy, x_dy_imag] = detail::factor_by_lanes(number(k.for_x.dy_scale));
    table.set(c,
              {std::complex<T>{center}, dy_u, dy_u_imag, dy_x, dy_x_imag,
               number(k.for_dy.shift - of_lost * k.for_dy.x_scale), x_dy, x_dy_imag, both(has_u ? k.for_x.u_scale : 0),
               both(k.for_x.x_scale), number(k.for_x.shift - k.for_x.x_scale * of_lost)});
  }
  auto const map = [&](detail::number_run const& run) {
    auto const at = [&](auto const& view) { return &view(run.sample, run.channel, run.position); };
    auto const* const from_dy = reinterpret_cast<T const*>(at(of.dy));
    auto const* const from_x = reinterpret_cast<T const*>(at(of.x));
    auto const* const from_u = reinterpret_cast<T const*>(at(u));
    auto* const of_dy = reinterpret_cast<T*>(at(to_dy));
    auto* const of_x = reinterpret_cast<T*>(at(to_x));
    if (!run.counts && zeroes) {
      if (has_dy) std::fill_n(of_dy, 2 * run.numbers, T{0});
      if (has_x) std::fill_n(of_x, 2 * run.numbers, T{0});
      return;
    }
    table.with(
        run, positions, [&](auto const& k) __attribute__((always_inline)) {
          std::int64_t const n = 2 * run.numbers;
          bool const streams = detail::may_stream(of_dy, n, how) &&
                               detail::elements_since_line(of_dy) == detail::elements_since_line(of_x);
          detail::for_each_numbers_written(
              of_dy, n, streams, [&]<int L, bool Stream>(std::int64_t i) __attribute__((always_inline)) {
                using vector = detail::vector_t<T, L>;
                auto const get = [&](std::size_t j) __attribute__((always_inline)) { return k.template get<L>(j, i); };
                vector const d = detail::load<L>(from_x + i) - get(0), v = detail::load<L>(from_u + i);
                vector const g = detail::load<L>(from_dy + i);
                if (has_dy) {
                  vector const sum = detail::add_given<T, L>(get(5), d, get(3), get(4), of.turns);
                  detail::write<Stream, L>(of_dy + i, detail::add_given<T, L>(sum, v, get(1), get(2), of.turns));
                }
                if (!has_x) return;
                vector sum{};
                if (run.counts) sum = detail::add_given<T, L>(detail::add_given<T, L>(get(10), d, get(9)), v, get(8));
                detail::write<Stream, L>(of_x + i, detail::add_given<T, L>(sum, g, get(6), get(7), of.turns));
              });
        });
  };
  detail::for_each_part(exec, of.x, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(positions, first, last, of.mask.mask, map, of.x, of.dy, u, to_dy, to_x);
  });
}

} // namespace syncnorm::host
