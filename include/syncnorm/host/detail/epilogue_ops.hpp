#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/activation.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// y = f((x − center)·scale + shift + residual), or 0 where positions do not count. The coefficients are `normalize_terms`.
template <class F, bool Residual>
struct epilogue_op {
  static constexpr std::size_t inputs = Residual ? 2 : 1, outputs = 1, coefficients = 3;
  static constexpr bool takes_mask = true;

  F f;

  template <class V, class Lanes>
  [[gnu::always_inline]] std::array<V, outputs>
  apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k, Lanes const& counted) const {
    V v = multiply_add<V>(in[0] - k[1], k[0], k[2]);
    if constexpr (Residual) v = f.add(v, in[1]);
    return {where(counted, f.value(v), V{})};
  }
};

/// The coefficients of `epilogue_gradient_op`.
template <class A>
struct epilogue_gradient_terms {
  static constexpr std::size_t coefficients = 6;

  std::span<double const> mean, inv_std;
  channel_values gamma, beta;
  std::span<double const> sum_dy, sum_dy_xmu;
  normalized_count count;
  bool of_activated = false; ///< dx = dv

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    bool const constant = count.n == 0;
    auto const v = make_normalize_coefficients<A>(mean[c], inv_std[c], gamma[c], beta[c]);
    if (of_activated) return {A{1}, v.center, A{0}, A{0}, v.scale, v.shift};
    auto const k = make_backward_coefficients<A>(mean[c], inv_std[c], gamma[c], constant ? 0.0 : sum_dy[c],
                                                 constant ? 0.0 : sum_dy_xmu[c], count);
    return {k.dy_scale, k.center, k.x_scale, k.shift, v.scale, v.shift};
  }
};

/// dv = dy·f′(v), where v is what the forward pass activated, and dx = dv·dy_scale + (x − center)·x_scale + shift, of
/// which the positions that do not count have the first term alone, and all have where statistics are constant, whatever x is.
/// Outputs dx, and dv as the gradient of a residual.
template <class F, bool Residual>
struct epilogue_gradient_op {
  static constexpr std::size_t inputs = Residual ? 3 : 2, outputs = Residual ? 2 : 1, coefficients = 6;
  static constexpr bool takes_mask = true;

  F f;
  typename F::arithmetic uncounted; ///< 1: outputs that do not count have a gradient; 0: they are 0, and so is theirs
  bool constant;

  template <class V, class Lanes>
  [[gnu::always_inline]] std::array<V, outputs>
  apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k, Lanes const& counted) const {
    V const zero{};
    V const d = in[1] - k[1];
    V v = multiply_add(d, k[4], k[5]);
    if constexpr (Residual) v = f.add(v, in[2]);
    V const dv = gradient_of_counted(f, v, in[0], uncounted, counted);
    V const of_x = constant ? zero : where(counted, multiply_add<V>(d, k[2], k[3]), zero);
    V const dx = multiply_add<V>(dv, k[0], of_x);
    if constexpr (Residual) {
      return {dx, dv};
    } else {
      return {dx};
    }
  }
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
