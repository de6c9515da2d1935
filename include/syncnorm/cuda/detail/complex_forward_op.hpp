#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex_value.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/complex_element.hpp>
#include <syncnorm/cuda/detail/forward_op.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>

namespace syncnorm::cuda::detail {

/// value·(re + i·im), or, unless it `turns`, value·re, of which no part depends on the other.
template <class T>
[[nodiscard]] SYNCNORM_DEVICE complex_element<T> scaled(complex_element<T> value, T re, T im, bool turns) {
  complex_element<T> made{value.re * re, value.im * re};
  if (turns) made.re -= value.im * im, made.im += value.re * im;
  return made;
}

/// What rounding to `T` loses.
template <class T>
[[nodiscard]] SYNCNORM_DEVICE complex_value lost_of(complex_value value) {
  auto const of = [](double part) { return part - static_cast<double>(static_cast<T>(part)); };
  return {of(value.re), of(value.im)};
}

/// gamma of a channel, and number c of `[C, 2]`.
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE complex_value load_gamma(Hw const& hw, complex_affine_values const& from,
                                                       std::int64_t c) {
  return {load_value(hw, from.gamma, c, 1), load_value(hw, from.gamma_imag, c, 0)};
}
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE complex_value load_number(Hw const& hw, channel_values const& from, std::int64_t c) {
  return {load_value(hw, from, 2 * c, 0), load_value(hw, from, 2 * c + 1, 0)};
}

/// Number c of a row of a packet.
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE complex_value number_of(Hw const& hw, incoming_packets const& from, int rank, int row,
                                                      std::int64_t c) {
  return {from.value(hw, rank, row, 2 * c), from.value(hw, rank, row, 2 * c + 1)};
}

/// Those of complex channels: mean and running mean `[C, 2]`, inv_std `[C, 2]` of equal components, the running variance `[C]`.
struct complex_forward_statistics : forward_statistics {
  complex_affine_values numbers{}; ///< the parameters, in the place of `affine`

  static constexpr int values = 4;

  struct summary {
    complex_value mean;
    double inv_std, m2; ///< m2: of both components; 0 where statistics are constant
    std::int64_t count;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool refuses(Hw const&, summary const& s) const {
    return s.count == 1;
  }

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    if (constant())
      return {load_number(hw, running.mean, c), inverse_deviation(load_value(hw, running.var, c, 1), variance, eps), 0,
              0};
    incoming_packets const from{packets, 2 * channels};
    moments<double> all[2];
    for (int rank = 0; rank < from.ranks(); ++rank) {
      std::int64_t const count = from.count(hw, rank);
      SYNCNORM_UNROLL
      for (int i = 0; i < 2; ++i)
        all[i] = merge(all[i], {count, from.value(hw, rank, 0, 2 * c + i), from.value(hw, rank, 1, 2 * c + i)});
    }
    if (all[0].count == 0) return {{0, 0}, 0, 0, 0};
    normalized_count const n{all[0].count, saved.normalized_by};
    double const m2 = all[0].m2 + all[1].m2;
    return {{all[0].mean, all[1].mean},
            inverse_deviation(m2 / static_cast<double>(n.degrees_of_freedom()), eps),
            m2,
            all[0].count};
  }

  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    double const mean[2] = {s.mean.re, s.mean.im};
    SYNCNORM_UNROLL
    for (int i = 0; i < 2; ++i) {
      hw.store(saved.mean + 2 * c + i, mean[i]);
      hw.store(saved.inv_std + 2 * c + i, s.inv_std);
    }
    if (c == 0) hw.store(saved.count, s.count);
    if (constant() || running.mean.data == nullptr || s.count == 0) return;
    double const weight = weight_of_batch(hw);
    SYNCNORM_UNROLL
    for (int i = 0; i < 2; ++i) learn(hw, running.mean, 2 * c + i, weight, mean[i]);
    learn(hw, running.var, c, weight, running_value(s.m2, s.count));
  }
};

/// y = (x − center)·scale + shift, or 0 where positions do not count.
template <class T>
struct complex_normalize_op {
  using element_type = complex_element<T>;
  using A = T;
  static constexpr int inputs = 1, needed_inputs = 1, outputs = 1, coefficients = 6, threads = 256;
  static constexpr int unroll = 4, unroll_aligned = 2;
  static constexpr int resident[2] = {2, 2};

  tensor_view<element_type const> x;
  tensor_view<element_type> y;
  mask_view mask{};   ///< of the outputs that are not 0
  bool turns = false; ///< scale is complex
  complex_forward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& lead() const { return x; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<element_type const> const& input(int) const { return x; }
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.x) && f(op.y);
  }

  template <class Hw>
  SYNCNORM_DEVICE void coefficients_at(Hw const& hw, std::int64_t c, complex_forward_statistics::summary const& s,
                                       A (&k)[coefficients]) const {
    auto const gamma = load_gamma(hw, statistics.numbers, c), beta = load_number(hw, statistics.numbers.beta, c);
    auto const scale = s.inv_std * gamma, lost = lost_of<T>(s.mean) * scale;
    k[0] = static_cast<A>(s.mean.re), k[1] = static_cast<A>(s.mean.im);
    k[2] = static_cast<A>(scale.re), k[3] = static_cast<A>(scale.im);
    k[4] = static_cast<A>(beta.re - lost.re), k[5] = static_cast<A>(beta.im - lost.im);
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<element_type> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, x, at, use);
  }
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], element_type const (&in)[inputs], bool counts,
                             element_type (&out)[outputs]) const {
    auto const made = scaled<T>({in[0].re - k[0], in[0].im - k[1]}, k[2], k[3], turns);
    out[0] = counts ? element_type{made.re + k[4], made.im + k[5]} : element_type{0, 0};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<element_type> const (&out)[outputs]) const {
    store_at<Axis, K>(hw, y, at, out[0], use);
  }
};

} // namespace syncnorm::cuda::detail
