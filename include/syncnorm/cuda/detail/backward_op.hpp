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

/// The sums of a backward pass over all ranks, and of this one; none where statistics are constant, and no gradients are wanted.
struct backward_statistics {
  gathered_packets packets{};
  packet_place own{};
  saved_statistics saved{};
  affine_values affine{};
  affine_outputs gradients{};
  fault_report report{};

  static constexpr int values = 2;

  struct summary {
    double mean, inv_std, sum_dy, sum_dy_xmu, own_dy, own_dy_xmu;
    std::int64_t count;
  };

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    if (packets.data == nullptr) return {hw.load(saved.mean + c), hw.load(saved.inv_std + c), 0, 0, 0, 0, 0};
    incoming_packets const from{packets, channels}, mine{own_packet(own), channels};
    summary s{hw.load(saved.mean + c), hw.load(saved.inv_std + c), 0, 0, mine.value(hw, 0, 0, c),
              mine.value(hw, 0, 1, c), hw.load(saved.count)};
    for (int rank = 0; rank < from.ranks(); ++rank) {
      s.sum_dy += from.value(hw, rank, 0, c);
      s.sum_dy_xmu += from.value(hw, rank, 1, c);
    }
    return s;
  }
  /// Of one rank alone, by the values of `backward_sums_op`.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary of_rank(Hw const& hw, std::int64_t c, double const (&)[2],
                                                double const (&value)[values]) const {
    return {hw.load(saved.mean + c), hw.load(saved.inv_std + c), value[0], value[1], value[0], value[1],
            hw.load(saved.count)};
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool failed_before(Hw const& hw) const {
    return hw.load(saved.count) < 0;
  }
  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    add_value(hw, gradients.gamma, c, s.inv_std * s.own_dy_xmu);
    add_value(hw, gradients.beta, c, s.own_dy);
  }
  template <class Hw>
  SYNCNORM_DEVICE void count_pass(Hw const&, std::uint32_t, std::int64_t) const {}
  template <class Hw>
  SYNCNORM_DEVICE void fail(Hw const& hw, incoming_packets const& from, pass_fault fault) const {
    from.tell(hw, report, fault);
  }
};

/// dx = dv·dy_scale + (x − center)·x_scale + shift, of which positions that do not count have the first term alone; dv is dy,
/// with an epilogue the gradient of what was activated, and that of a residual.
template <class T, epilogue_kind Kind>
struct gradient_op {
  static constexpr bool has_epilogue = Kind != epilogue_kind::none;
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = has_epilogue ? 3 : 2, needed_inputs = 2, outputs = has_epilogue ? 2 : 1,
                       coefficients = has_epilogue ? 6 : 4;
  static constexpr int unroll = has_epilogue && sizeof(T) == 2 ? 1 : 2, unroll_aligned = unroll, threads = 256;
  static constexpr int resident[2] = {has_epilogue ? 2 : 3, 2};

  tensor_view<T const> dy, x, residual{}; ///< residual without data: none
  tensor_view<T> dx, dresidual{};         ///< without data: not needed
  mask_view mask{};                       ///< of the positions that count
  A slope = 1;
  bool zeroes = false; ///< outputs that do not count are 0
  backward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& input(int i) const {
    return i == 0 ? dy : i == 1 ? x : residual;
  }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T> const& output(int o) const { return o == 0 ? dx : dresidual; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.residual.data == nullptr || f(op.residual)) &&
           (op.dx.data == nullptr || f(op.dx)) && (op.dresidual.data == nullptr || f(op.dresidual));
  }

  SYNCNORM_DEVICE void coefficients_of(backward_statistics::summary const& s, double gamma, double beta,
                                       A (&k)[coefficients]) const {
    bool const constant = s.count == 0;
    auto const made =
        make_backward_coefficients<A>(s.mean, s.inv_std, gamma, constant ? 0 : s.sum_dy, constant ? 0 : s.sum_dy_xmu,
                                      {s.count, statistics.saved.normalized_by});
    k[0] = made.dy_scale, k[1] = made.center, k[2] = made.x_scale, k[3] = made.shift;
    if constexpr (has_epilogue) {
      auto const v = make_normalize_coefficients<A>(s.mean, s.inv_std, gamma, beta);
      k[4] = v.scale, k[5] = v.shift;
    }
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, dy, at, use);
    in[1] = load_at<Axis, K>(hw, x, at, use);
    if constexpr (has_epilogue) {
      in[2] = pack<T>{};
      if (residual.data != nullptr) in[2] = load_at<Axis, K>(hw, residual, at, use);
    }
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load_rest(Hw const&, spot const&, pack<T> (&)[inputs]) const {}
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], T const (&in)[inputs], bool counts, T (&out)[outputs]) const {
    A dv = to_accumulate(in[0]);
    A const d = to_accumulate(in[1]) - k[1];
    if constexpr (has_epilogue) {
      A v = d * k[4] + k[5];
      if (residual.data != nullptr) v += to_accumulate(in[2]);
      dv = activation_gradient<Kind>(v, dv, slope);
      dv = counts || !zeroes ? dv : A{0};
      out[1] = from_accumulate<T>(dv);
      out[0] = from_accumulate<T>(dv * k[0] + (counts ? of_x(k, d) : A{0}));
    } else {
      out[0] = from_accumulate<T>(dv * k[0] + of_x(k, d));
    }
  }
  /// Nothing where statistics are constant, whatever x is.
  SYNCNORM_DEVICE static A of_x(A const (&k)[coefficients], A d) { return k[2] == 0 ? k[3] : d * k[2] + k[3]; }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<T> const (&out)[outputs]) const {
    if (dx.data != nullptr) store_at<Axis, K>(hw, dx, at, out[0], use);
    if constexpr (has_epilogue)
      if (dresidual.data != nullptr) store_at<Axis, K>(hw, dresidual, at, out[1], use);
  }
};

} // namespace syncnorm::cuda::detail
