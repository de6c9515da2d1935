#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/map_elements.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>

namespace syncnorm::host {

namespace detail {

/// The coefficients of `recover_op`.
template <class A>
struct recover_terms {
  static constexpr std::size_t coefficients = 3;

  std::span<double const> mean, inv_std;
  channel_values gamma, beta;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    auto const k = make_normalize_coefficients<A>(mean[c], inv_std[c], gamma[c], beta[c]);
    double const scale = inv_std[c] * gamma[c];
    return {k.shift, scale == 0 ? A{0} : static_cast<A>(1 / scale), k.center};
  }
};

/// x = (f⁻¹(y) − residual − shift)/scale + center, of `epilogue_op`. Inputs are y and the residual, which may be anything where
/// there is none.
template <class A>
struct recover_op {
  static constexpr std::size_t inputs = 2, outputs = 1, coefficients = 3;
  static constexpr bool takes_mask = false;

  A inverse_slope;
  bool has_residual;

  template <class V, class Lanes>
  std::array<V, outputs> apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k,
                               Lanes const&) const {
    V const zero{};
    V v = in[0] < zero ? in[0] * (inverse_slope - zero) : in[0];
    if (has_residual) v -= in[1];
    return {(v - k[0]) * k[1] + k[2]};
  }
};

} // namespace detail

/// x from the y that `normalize` made of it, up to rounding, in channels where `is_recoverable`; where inv_std is 0, the mean.
///
/// Shapes: as of `normalize`; x may be y. The epilogue is that of the forward pass; where its mask made y 0, x is not x.
/// Local.
template <class T>
requires element<T>
void recover(executor_ref exec, std::type_identity_t<tensor_view<T const>> y, tensor_view<T> x,
             std::span<double const> mean, std::span<double const> inv_std, affine_values const& params,
             std::type_identity_t<prepared_epilogue<T>> const& epilogue) {
  using A = accumulate_t<T>;
  A const inverse = A{1} / static_cast<A>(recoverable_slope(epilogue.activation()));
  detail::recover_terms<A> const terms{mean, inv_std, params.gamma, params.beta};
  bool const has_residual = epilogue.has_residual();
  detail::map_elements<T>(exec, detail::recover_op<A>{inverse, has_residual}, terms, {y, epilogue.residual_or(y)}, {x},
                          nullptr, stores::automatic);
}

} // namespace syncnorm::host
