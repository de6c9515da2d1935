#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/complex_element.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/detail/reduce_ops.hpp>
#include <syncnorm/cuda/operands.hpp>

// What reduce_kernel sums of complex numbers. In packets a complex channel is two of real numbers, its real and its imaginary parts, as on
// the host.
namespace syncnorm::cuda::detail {

/// Count, and mean and m2 of real and of imaginary parts.
template <class T>
struct complex_moments_op {
  using real = moments_op<T>;
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 1, needed_inputs = 1, components = 2, sums = 4, parts = 5, values = 4, threads = 256;
  static constexpr int unroll[2] = {4, 4}, unroll_aligned = 2;
  static constexpr int resident[2] = {2, 2};
  static constexpr bool counts = true, pivoted = true;

  tensor_view<element_type const> x;
  mask_view mask{};

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& input(int) const { return x; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.x);
  }

  struct constants {};
  struct fine {
    typename real::fine re, im;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const&, std::int64_t) const {
    return {};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, x, at, cached::normally);
  }
  static SYNCNORM_DEVICE void set_pivot(fine& to, element_type value) {
    real::set_pivot(to.re, value.re);
    real::set_pivot(to.im, value.im);
  }
  static SYNCNORM_DEVICE void add(fine& to, constants const&, element_type const (&in)[inputs], bool counts_too) {
    T const re[1] = {in[0].re}, im[1] = {in[0].im};
    real::add(to.re, {}, re, counts_too);
    real::add(to.im, {}, im, counts_too);
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    double re[2] = {sum[0], sum[1]}, im[2] = {sum[2], sum[3]};
    real::flush(from.re, re);
    real::flush(from.im, im);
    sum[0] = re[0], sum[1] = re[1], sum[2] = im[0], sum[3] = im[1];
  }
  static SYNCNORM_DEVICE void move_pivot(fine& from, double (&sum)[sums], std::int64_t n, A one_of) {
    double re[2] = {sum[0], sum[1]}, im[2] = {sum[2], sum[3]};
    real::move_pivot(from.re, re, n, one_of);
    real::move_pivot(from.im, im, n, one_of);
    sum[0] = re[0], sum[1] = re[1], sum[2] = im[0], sum[3] = im[1];
  }
  static SYNCNORM_DEVICE void finish(fine const& from, constants const&, double const (&sum)[sums], std::int64_t n,
                                     double one_of, double (&part)[parts]) {
    double const re[2] = {sum[0], sum[1]}, im[2] = {sum[2], sum[3]};
    double of_re[3], of_im[3];
    real::finish(from.re, {}, re, n, one_of, of_re);
    real::finish(from.im, {}, im, n, one_of, of_im);
    join(of_re, of_im, part);
  }

  template <class At>
  static SYNCNORM_DEVICE void combine(At const& at, int k, double (&all)[parts]) {
    double of_re[3], of_im[3];
    real::combine([&](int i, int p) { return at(i, place(p, 0)); }, k, of_re);
    real::combine([&](int i, int p) { return at(i, place(p, 1)); }, k, of_im);
    join(of_re, of_im, all);
  }
  template <class Hw>
  static SYNCNORM_DEVICE void combine_warp(Hw const& hw, double (&all)[parts]) {
    double of_re[3] = {all[0], all[1], all[3]}, of_im[3] = {all[0], all[2], all[4]};
    real::combine_warp(hw, of_re);
    real::combine_warp(hw, of_im);
    join(of_re, of_im, all);
  }

  /// The means, and then both m2.
  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const&, std::int64_t, double const (&all)[parts], double (&value)[values]) const {
    SYNCNORM_UNROLL
    for (int v = 0; v < values; ++v) value[v] = all[v + 1];
  }
  template <class Hw>
  static SYNCNORM_DEVICE void add_before(Hw const& hw, incoming_packets const& before, std::int64_t c,
                                         double (&all)[parts], double (&value)[values]) {
    auto const counted = static_cast<std::int64_t>(all[0]);
    SYNCNORM_UNROLL
    for (int i = 0; i < 2; ++i) {
      auto const merged = merge(
          moments<double>{before.count(hw, 0), before.value(hw, 0, 0, 2 * c + i), before.value(hw, 0, 1, 2 * c + i)},
          moments<double>{counted, value[i], value[2 + i]});
      all[0] = static_cast<double>(merged.count), value[i] = merged.mean, value[2 + i] = merged.m2;
    }
  }

private:
  /// Where part p of a component is.
  [[nodiscard]] static SYNCNORM_DEVICE constexpr int place(int p, int component) {
    return p == 0 ? 0 : 2 * p - 1 + component;
  }
  static SYNCNORM_DEVICE void join(double const (&of_re)[3], double const (&of_im)[3], double (&all)[parts]) {
    all[0] = of_re[0], all[1] = of_re[1], all[2] = of_im[1], all[3] = of_re[2], all[4] = of_im[2];
  }
};

/// Σ dy and Σ dy·conj(x − mean), of which a real gamma needs the real part alone, and has no other.
template <class T>
struct complex_backward_sums_op : added_parts<4, 2> {
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 2, needed_inputs = 2, values = 4, threads = 256;
  static constexpr int unroll[2] = {2, 2}, unroll_aligned = 1;
  static constexpr int resident[2] = {2, 2};
  static constexpr bool pivoted = false;

  tensor_view<element_type const> dy, x;
  mask_view mask{}; ///< of the outputs that have a gradient
  saved_statistics saved{};
  bool turns = false; ///< gamma is complex

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& input(int i) const {
    return i == 0 ? dy : x;
  }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x);
  }

  struct constants {
    element_type center;
  };
  struct fine {
    element_type first, second;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const& hw, std::int64_t c) const {
    return {{static_cast<T>(hw.load(saved.mean + 2 * c)), static_cast<T>(hw.load(saved.mean + 2 * c + 1))}};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, dy, at, cached::normally);
    in[1] = load_at<Axis, K>(hw, x, at, cached::normally);
  }
  static SYNCNORM_DEVICE void set_pivot(fine&, element_type) {}
  SYNCNORM_DEVICE void add(fine& to, constants const& k, element_type const (&in)[inputs], bool counts_too) const {
    if (!counts_too) return;
    element_type const g = in[0], d{in[1].re - k.center.re, in[1].im - k.center.im};
    to.first.re += g.re;
    to.first.im += g.im;
    to.second.re += g.re * d.re + g.im * d.im;
    if (turns) to.second.im += g.im * d.re - g.re * d.im;
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    sum[0] += static_cast<double>(from.first.re);
    sum[1] += static_cast<double>(from.first.im);
    sum[2] += static_cast<double>(from.second.re);
    sum[3] += static_cast<double>(from.second.im);
    from = {};
  }
  SYNCNORM_DEVICE void finish(fine const&, constants const&, double const (&sum)[sums], std::int64_t, double,
                              double (&part)[parts]) const {
    SYNCNORM_UNROLL
    for (int p = 0; p < parts; ++p) part[p] = sum[p];
  }

  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const& hw, std::int64_t c, double const (&all)[parts],
                                 double (&value)[values]) const {
    // Makes up for what rounding the mean lost.
    auto const lost = [&](std::int64_t i) {
      double const mean = hw.load(saved.mean + i);
      return mean - static_cast<double>(static_cast<T>(mean));
    };
    double const re = lost(2 * c), im = lost(2 * c + 1);
    value[0] = all[0], value[1] = all[1];
    value[2] = all[2] - (re * all[0] + im * all[1]);
    value[3] = turns ? all[3] - (re * all[1] - im * all[0]) : 0;
  }
};

} // namespace syncnorm::cuda::detail
