#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
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
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

/// The sums of a backward pass over complex channels, of all ranks and of this one; none where statistics are constant, and no gradients
/// are wanted.
struct complex_backward_statistics {
  gathered_packets packets{};
  packet_place own{};
  saved_statistics saved{};
  complex_affine_values numbers{};
  complex_affine_outputs gradients{};
  fault_report report{};

  static constexpr int values = 4;

  struct sums {
    complex_value dy, dy_xmu;
  };
  struct summary {
    complex_value mean;
    double inv_std;
    sums all, own;
    std::int64_t count;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    summary s{
        {hw.load(saved.mean + 2 * c), hw.load(saved.mean + 2 * c + 1)}, hw.load(saved.inv_std + 2 * c), {}, {}, 0};
    if (packets.data == nullptr) return s;
    incoming_packets const from{packets, 2 * channels}, mine{own_packet(own), 2 * channels};
    s.count = hw.load(saved.count);
    add(hw, mine, 0, c, s.own);
    for (int rank = 0; rank < from.ranks(); ++rank) add(hw, from, rank, c, s.all);
    return s;
  }
  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    add_value(hw, gradients.gamma, c, s.inv_std * s.own.dy_xmu.re);
    add_value(hw, gradients.gamma_imag, c, s.inv_std * s.own.dy_xmu.im);
    add_value(hw, gradients.beta, 2 * c, s.own.dy.re);
    add_value(hw, gradients.beta, 2 * c + 1, s.own.dy.im);
  }
  template <class Hw>
  SYNCNORM_DEVICE void count_pass(Hw const&, std::uint32_t, std::int64_t) const {}
  template <class Hw>
  SYNCNORM_DEVICE void fail(Hw const& hw, incoming_packets const& from, pass_fault fault) const {
    from.tell(hw, report, fault);
  }

private:
  template <class Hw>
  static SYNCNORM_DEVICE void add(Hw const& hw, incoming_packets const& from, int rank, std::int64_t c, sums& to) {
    to.dy = to.dy + number_of(hw, from, rank, 0, c);
    to.dy_xmu = to.dy_xmu + number_of(hw, from, rank, 1, c);
  }
};

/// dx = dy·dy_scale + (x − center)·x_scale + shift, of which positions that do not count have the first term alone, or nothing where their
/// outputs are 0.
template <class T>
struct complex_gradient_op {
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 2, needed_inputs = 2, outputs = 1, coefficients = 7, threads = 256;
  static constexpr int unroll = 2, unroll_aligned = 2;
  static constexpr int resident[2] = {2, 2};

  tensor_view<element_type const> dy, x;
  tensor_view<element_type> dx; ///< without data: not needed
  mask_view mask{};             ///< of the positions that count
  bool zeroes = false;          ///< outputs that do not count are 0
  bool turns = false;           ///< gamma is complex
  complex_backward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& input(int i) const {
    return i == 0 ? dy : x;
  }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.dx.data == nullptr || f(op.dx));
  }

  /// As of a real channel, of the gradient of (x − mean)·inv_std, which is dy·conj(gamma).
  template <class Hw>
  SYNCNORM_DEVICE void coefficients_at(Hw const& hw, std::int64_t c, complex_backward_statistics::summary const& s,
                                       A (&k)[coefficients]) const {
    auto const gamma = load_gamma(hw, statistics.numbers, c);
    auto const turned = s.inv_std * gamma.conjugate();
    k[0] = static_cast<A>(turned.re), k[1] = static_cast<A>(turned.im);
    k[2] = static_cast<A>(s.mean.re), k[3] = static_cast<A>(s.mean.im);
    k[4] = k[5] = k[6] = 0;
    if (s.count == 0) return; // by constant statistics
    normalized_count const n{s.count, statistics.saved.normalized_by};
    double const along = (turned * s.all.dy_xmu).re;
    double const x_scale = -(s.inv_std / static_cast<double>(n.degrees_of_freedom())) * (s.inv_std * along);
    auto const of_dy = turned * s.all.dy, lost = lost_of<T>(s.mean);
    auto const count = static_cast<double>(s.count);
    k[4] = static_cast<A>(x_scale);
    k[5] = static_cast<A>(-of_dy.re / count - lost.re * x_scale);
    k[6] = static_cast<A>(-of_dy.im / count - lost.im * x_scale);
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, dy, at, use);
    in[1] = load_at<Axis, K>(hw, x, at, use);
  }
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], element_type const (&in)[inputs], bool counts,
                             element_type (&out)[outputs]) const {
    auto made = scaled<T>(in[0], k[0], k[1], turns);
    // Nothing of what does not count, and not 0 times it: it may be infinite.
    bool const depends = counts && k[4] != 0;
    if (counts) made.re += k[5], made.im += k[6];
    if (depends) made.re += (in[1].re - k[2]) * k[4], made.im += (in[1].im - k[3]) * k[4];
    out[0] = counts || !zeroes ? made : element_type{0, 0};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<element_type> const (&out)[outputs]) const {
    if (dx.data != nullptr) store_at<Axis, K>(hw, dx, at, out[0], use);
  }
};

} // namespace syncnorm::cuda::detail
