#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex_second_order.hpp>
#include <syncnorm/core/complex_value.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/complex_element.hpp>
#include <syncnorm/cuda/detail/complex_forward_op.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/detail/reduce_ops.hpp>
#include <syncnorm/cuda/operands.hpp>

// Formulae and names as in `complex_batch_norm_double_backward`.
namespace syncnorm::cuda::detail {

/// The gradient with respect to that of gamma, of a channel.
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE complex_value load_second_gamma(Hw const& hw, channel_values const& real,
                                                              channel_values const& imag, std::int64_t c) {
  return {load_value(hw, real, c, 0), load_value(hw, imag, c, 0)};
}

/// Σ w·dy, Σ w·dy·conj(X), Σ m·u, Re Σ m·u·conj(X) and Σ w·dy·conj(u), where X = x − mean; of these products the real parts alone where
/// gamma is real.
template <class T>
struct complex_double_backward_sums_op : added_parts<9, 2> {
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 3, values = 14, threads = 128;
  static constexpr int unroll[2] = {1, 1}, unroll_aligned = 1;
  static constexpr int resident[2] = {4, 2};
  static constexpr bool pivoted = false;
  static constexpr bool sums_all = true; ///< elements that do not count are in some sums

  tensor_view<element_type const> u, dy, x; ///< u without data: 0
  mask_view mask{};                         ///< of the positions that count
  bool zeroes = false;                      ///< outputs that do not count are 0
  bool turns = false;                       ///< gamma is complex
  saved_statistics saved{};
  channel_values gamma_gradient{}, gamma_imag_gradient{};

  struct constants {
    element_type center;
  };
  struct fine {
    A of[sums];
  };

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.u.data == nullptr || f(op.u));
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const& hw, std::int64_t c) const {
    return {{static_cast<T>(hw.load(saved.mean + 2 * c)), static_cast<T>(hw.load(saved.mean + 2 * c + 1))}};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = pack<element_type>{};
    if (u.data != nullptr) in[0] = load_at<Axis, K>(hw, u, at, cached::normally);
    in[1] = load_at<Axis, K>(hw, dy, at, cached::normally);
    in[2] = load_at<Axis, K>(hw, x, at, cached::normally);
  }
  static SYNCNORM_DEVICE void set_pivot(fine&, element_type) {}
  SYNCNORM_DEVICE void add(fine& to, constants const& k, element_type const (&in)[inputs], bool counts_too,
                           bool exists) const {
    // Nothing of what does not count, and not 0 times it: it may be infinite.
    if (!exists || (zeroes && !counts_too)) return;
    element_type const second = in[0], g = in[1], d{in[2].re - k.center.re, in[2].im - k.center.im};
    to.of[0] += g.re;
    to.of[1] += g.im;
    to.of[2] += g.re * d.re + g.im * d.im;
    if (turns) to.of[3] += g.im * d.re - g.re * d.im;
    if (u.data == nullptr) return;
    to.of[7] += g.re * second.re + g.im * second.im;
    if (turns) to.of[8] += g.im * second.re - g.re * second.im;
    if (!counts_too) return;
    to.of[4] += second.re;
    to.of[5] += second.im;
    to.of[6] += second.re * d.re + second.im * d.im;
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    SYNCNORM_UNROLL
    for (int i = 0; i < sums; ++i) {
      sum[i] += static_cast<double>(from.of[i]);
      from.of[i] = 0;
    }
  }
  SYNCNORM_DEVICE void finish(fine const&, constants const&, double const (&sum)[sums], std::int64_t, double,
                              double (&part)[parts]) const {
    SYNCNORM_UNROLL
    for (int i = 0; i < sums; ++i) part[i] = sum[i];
  }

  /// Seven rows of numbers, as the host has them.
  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const& hw, std::int64_t c, double const (&all)[parts],
                                 double (&value)[values]) const {
    // Makes up for what rounding the mean lost.
    auto const lost = lost_of<T>({hw.load(saved.mean + 2 * c), hw.load(saved.mean + 2 * c + 1)});
    complex_value const dy_sum{all[0], all[1]};
    complex_value const dy_xmu{all[2] - (lost.re * all[0] + lost.im * all[1]),
                               turns ? all[3] - (lost.re * all[1] - lost.im * all[0]) : 0};
    auto const turned = load_second_gamma(hw, gamma_gradient, gamma_imag_gradient, c).conjugate();
    auto const a_dy = times_given(turned, dy_sum);
    value[0] = dy_sum.re, value[1] = dy_sum.im;
    value[2] = dy_xmu.re, value[3] = dy_xmu.im;
    value[4] = all[4], value[5] = all[5];
    value[6] = all[6] - (lost.re * all[4] + lost.im * all[5]), value[7] = 0;
    value[8] = all[7], value[9] = all[8];
    value[10] = a_dy.re, value[11] = a_dy.im;
    value[12] = times_given(turned, dy_xmu).re, value[13] = 0;
  }
};

/// Those sums over all ranks, and of this one.
struct complex_double_backward_statistics {
  gathered_packets packets{};
  packet_place own{};
  saved_statistics saved{};
  complex_affine_values numbers{};
  channel_values gamma_gradient{}, gamma_imag_gradient{},
      beta_gradient{};                ///< the gradients with respect to those, of beta `[C, 2]`
  complex_affine_outputs gradients{}; ///< gamma's alone
  fault_report report{};

  static constexpr int values = 14;

  struct summary {
    complex_value mean;
    double inv_std;
    complex_value a, b;
    complex_second_order_sums all; ///< of all ranks
    complex_value own_dy_u, own_u;
    double own_u_xhat;
    std::int64_t count;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    incoming_packets const from{packets, 2 * channels}, mine{own_packet(own), 2 * channels};
    complex_value sum[values / 2];
    for (int v = 0; v < values / 2; ++v)
      for (int rank = 0; rank < from.ranks(); ++rank) sum[v] = sum[v] + number_of(hw, from, rank, v, c);
    double const r = hw.load(saved.inv_std + 2 * c);
    return {{hw.load(saved.mean + 2 * c), hw.load(saved.mean + 2 * c + 1)},
            r,
            load_second_gamma(hw, gamma_gradient, gamma_imag_gradient, c),
            load_number(hw, beta_gradient, c),
            {sum[0], r * sum[1], sum[2], r * sum[3].re, sum[4], sum[5], r * sum[6].re},
            number_of(hw, mine, 0, 4, c),
            number_of(hw, mine, 0, 2, c),
            r * number_of(hw, mine, 0, 3, c).re,
            hw.load(saved.count)};
  }
  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    auto const more =
        complex_second_order_gamma(s.inv_std, s.own_u, s.own_u_xhat, s.own_dy_u, s.all, {s.count, saved.normalized_by});
    add_value(hw, gradients.gamma, c, more.re);
    add_value(hw, gradients.gamma_imag, c, more.im);
  }
  template <class Hw>
  SYNCNORM_DEVICE void count_pass(Hw const&, std::uint32_t, std::int64_t) const {}
  template <class Hw>
  SYNCNORM_DEVICE void fail(Hw const& hw, incoming_packets const& from, pass_fault fault) const {
    from.tell(hw, report, fault);
  }
};

/// to_dy = w·(u·u_scale + d·x_scale + shift) and to_x = w·dy·dy_scale + m·(u·u_scale + d·x_scale + shift), where d = x − center.
template <class T>
struct complex_double_gradient_op {
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 3, outputs = 2, coefficients = 14, threads = 256;
  static constexpr int unroll = 1, unroll_aligned = 1;
  static constexpr int resident[2] = {2, 2};

  tensor_view<element_type const> u, dy, x;  ///< u without data: 0
  tensor_view<element_type> to_dy{}, to_x{}; ///< without data: not needed
  mask_view mask{};                          ///< of the positions that count
  bool zeroes = false;                       ///< outputs that do not count are 0
  bool turns = false;                        ///< gamma is complex
  complex_double_backward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.u.data == nullptr || f(op.u)) && (op.to_dy.data == nullptr || f(op.to_dy)) &&
           (op.to_x.data == nullptr || f(op.to_x));
  }

  template <class Hw>
  SYNCNORM_DEVICE void coefficients_at(Hw const& hw, std::int64_t c,
                                       complex_double_backward_statistics::summary const& s,
                                       A (&k)[coefficients]) const {
    auto const made = make_complex_second_order_coefficients(s.inv_std, load_gamma(hw, statistics.numbers, c), s.a, s.b,
                                                             s.all, {s.count, statistics.saved.normalized_by});
    auto const lost = lost_of<T>(s.mean);
    auto const set = [&](int at, complex_value value) {
      k[at] = static_cast<A>(value.re), k[at + 1] = static_cast<A>(value.im);
    };
    set(0, s.mean);
    set(2, made.for_dy.u_scale);
    set(4, made.for_dy.x_scale);
    set(6, made.for_dy.shift - lost * made.for_dy.x_scale);
    set(8, made.for_x.dy_scale);
    set(10, made.for_x.shift - made.for_x.x_scale * lost);
    k[12] = static_cast<A>(made.for_x.u_scale), k[13] = static_cast<A>(made.for_x.x_scale);
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = pack<element_type>{};
    if (u.data != nullptr) in[0] = load_at<Axis, K>(hw, u, at, use);
    in[1] = load_at<Axis, K>(hw, dy, at, use);
    in[2] = load_at<Axis, K>(hw, x, at, use);
  }
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], element_type const (&in)[inputs], bool counts,
                             element_type (&out)[outputs]) const {
    bool const written = counts || !zeroes;
    element_type const d{in[2].re - k[0], in[2].im - k[1]};
    element_type to_g{k[6], k[7]}, through{0, 0};
    add_given(to_g, d, k[4], k[5]);
    if (u.data != nullptr) add_given(to_g, in[0], k[2], k[3]);
    if (counts) {
      through = {k[10] + times_given(k[13], d.re), k[11] + times_given(k[13], d.im)};
      if (u.data != nullptr) through.re += times_given(k[12], in[0].re), through.im += times_given(k[12], in[0].im);
    }
    if (written) add_given(through, in[1], k[8], k[9]);
    out[0] = written ? to_g : element_type{0, 0};
    out[1] = through;
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<element_type> const (&out)[outputs]) const {
    if (to_dy.data != nullptr) store_at<Axis, K>(hw, to_dy, at, out[0], use);
    if (to_x.data != nullptr) store_at<Axis, K>(hw, to_x, at, out[1], use);
  }

private:
  /// to += value·(re + i·im), of which what is 0 may meet anything.
  SYNCNORM_DEVICE void add_given(element_type& to, element_type value, A re, A im) const {
    to.re += times_given(re, value.re), to.im += times_given(re, value.im);
    if (turns) to.re -= times_given(im, value.im), to.im += times_given(im, value.re);
  }
};

} // namespace syncnorm::cuda::detail
