#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/epilogue_math.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

/// The sums of a double backward pass over all ranks, and of this one; rows as in `double_backward_sums_op`.
struct double_backward_statistics {
  gathered_packets packets{};
  packet_place own{};
  saved_statistics saved{};
  affine_values affine{};
  channel_values gamma_gradient{}, beta_gradient{}; ///< the gradients with respect to those of gamma and beta
  channel_outputs to_gamma{};
  fault_report report{};

  static constexpr int values = 7;

  struct summary {
    double mean, inv_std, a, b;
    second_order_sums all; ///< of all ranks
    double own_u_g, own_u, own_u_xhat;
    std::int64_t count;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    incoming_packets const from{packets, channels}, mine{own_packet(own), channels};
    double sums[values];
    for (int v = 0; v < values; ++v) {
      sums[v] = 0;
      for (int rank = 0; rank < from.ranks(); ++rank) sums[v] += from.value(hw, rank, v, c);
    }
    double const r = hw.load(saved.inv_std + c);
    return {hw.load(saved.mean + c),
            r,
            load_value(hw, gamma_gradient, c, 0),
            load_value(hw, beta_gradient, c, 0),
            {sums[0], r * sums[1], sums[2], r * sums[3], sums[4], sums[5], r * sums[6]},
            mine.value(hw, 0, 4, c),
            mine.value(hw, 0, 2, c),
            r * mine.value(hw, 0, 3, c),
            hw.load(saved.count)};
  }
  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    add_value(hw, to_gamma, c,
              second_order_gamma(s.inv_std, s.own_u, s.own_u_xhat, s.own_u_g, s.all, {s.count, saved.normalized_by}));
  }
  template <class Hw>
  SYNCNORM_DEVICE void count_pass(Hw const&, std::uint32_t, std::int64_t) const {}
  template <class Hw>
  SYNCNORM_DEVICE void fail(Hw const& hw, incoming_packets const& from, pass_fault fault) const {
    from.tell(hw, report, fault);
  }
};

/// to_dy = w·f′·(u·k₀ + d·k₁ + k₂ + v) and to_x = g·k₄ + m·(u·k₃ + d·k₅ + k₆), where d = x − center; m, w and g as in
/// `batch_norm_double_backward`.
template <class T, bool Epilogue>
struct double_gradient_op {
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = Epilogue ? 5 : 3, outputs = 2, coefficients = Epilogue ? 10 : 8;
  static constexpr int unroll = Epilogue || sizeof(T) == 2 ? 1 : 2, unroll_aligned = unroll, threads = 256;
  static constexpr int resident[2] = {2, Epilogue ? 1 : 2};

  tensor_view<T const> u, dy, x, residual{}, v{}; ///< u, residual or v without data: 0
  tensor_view<T> to_dy{}, to_x{};                 ///< without data: not needed
  mask_view mask{};                               ///< of the positions that count
  bool zeroes = false;                            ///< outputs that do not count are 0
  A slope = 1;
  double_backward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.u.data == nullptr || f(op.u)) && (op.to_dy.data == nullptr || f(op.to_dy)) &&
           (op.to_x.data == nullptr || f(op.to_x)) && (op.residual.data == nullptr || f(op.residual)) &&
           (op.v.data == nullptr || f(op.v));
  }

  SYNCNORM_DEVICE void coefficients_of(double_backward_statistics::summary const& s, double gamma,
                                       [[maybe_unused]] double beta, A (&k)[coefficients]) const {
    auto const made = make_second_order_coefficients(s.mean, s.inv_std, gamma, s.a, s.b, s.all,
                                                     {s.count, statistics.saved.normalized_by});
    A const center = static_cast<A>(s.mean);
    double const lost = s.mean - static_cast<double>(center);
    k[0] = static_cast<A>(made.for_dy.scale_a);
    k[1] = static_cast<A>(made.for_dy.scale_x);
    k[2] = static_cast<A>(made.for_dy.shift - lost * made.for_dy.scale_x);
    k[3] = static_cast<A>(made.for_x.scale_a);
    k[4] = static_cast<A>(made.for_x.scale_b);
    k[5] = static_cast<A>(made.for_x.scale_x);
    k[6] = static_cast<A>(made.for_x.shift - lost * made.for_x.scale_x);
    k[7] = center;
    if constexpr (Epilogue) {
      auto const activated = make_normalize_coefficients<A>(s.mean, s.inv_std, gamma, beta);
      k[8] = activated.scale, k[9] = activated.shift;
    }
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = pack<T>{};
    if (u.data != nullptr) in[0] = load_at<Axis, K>(hw, u, at, use);
    in[1] = load_at<Axis, K>(hw, dy, at, use);
    in[2] = load_at<Axis, K>(hw, x, at, use);
    if constexpr (Epilogue) {
      in[3] = in[4] = pack<T>{};
      if (residual.data != nullptr) in[3] = load_at<Axis, K>(hw, residual, at, use);
      if (v.data != nullptr) in[4] = load_at<Axis, K>(hw, v, at, use);
    }
  }
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], T const (&in)[inputs], [[maybe_unused]] bool counts,
                             T (&out)[outputs]) const {
    A const d = to_accumulate(in[2]) - k[7];
    A g = to_accumulate(in[1]), to_g = times_given(k[1], d) + k[2], through = times_given(k[5], d) + k[6];
    if (u.data != nullptr) {
      to_g += times_given(k[0], to_accumulate(in[0]));
      through += times_given(k[3], to_accumulate(in[0]));
    }
    if constexpr (Epilogue) {
      A activated = d * k[8] + k[9];
      if (residual.data != nullptr) activated += to_accumulate(in[3]);
      if (v.data != nullptr) to_g += to_accumulate(in[4]);
      bool const written = counts || !zeroes;
      g = written ? activation_gradient<epilogue_kind::linear>(activated, g, slope) : A{0};
      to_g = written ? activation_gradient<epilogue_kind::linear>(activated, to_g, slope) : A{0};
      through = counts ? through : A{0};
    }
    out[0] = from_accumulate<T>(to_g);
    out[1] = from_accumulate<T>(times_given(k[4], g) + through);
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<T> const (&out)[outputs]) const {
    if (to_dy.data != nullptr) store_at<Axis, K>(hw, to_dy, at, out[0], use);
    if (to_x.data != nullptr) store_at<Axis, K>(hw, to_x, at, out[1], use);
  }
};

} // namespace syncnorm::cuda::detail
