#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/activation.hpp>
#include <syncnorm/host/detail/simd.hpp>

// What sums of products over the elements of a channel are of: Σ a and Σ a·b, or Σ a, Σ a·b, Σ c, Σ c·b and Σ c·a. A type of terms has
//
//     static constexpr std::size_t inputs, coefficients, values;
//     std::array<A, coefficients> operator()(channel)
//     std::array<V, values> apply(std::array<V, inputs>, std::array<V, coefficients>)        a and b, or a, b and c
//     double excess(channel)        by which b is too large: the elements' arithmetic takes the mean rounded to their type
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// What the mean of a channel loses where it is rounded to `A`.
template <class A>
[[nodiscard]] inline double lost_by_rounding(std::span<double const> mean, std::int64_t channel) {
  double const exact = mean[static_cast<std::size_t>(channel)];
  return exact - static_cast<double>(static_cast<A>(exact));
}

/// dy and x − mean.
template <class A>
struct gradient_terms {
  static constexpr std::size_t inputs = 2, coefficients = 1, values = 2;
  std::span<double const> mean;

  std::array<A, coefficients> operator()(std::int64_t c) const {
    return {static_cast<A>(mean[static_cast<std::size_t>(c)])};
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                           std::array<V, coefficients> const& k) const {
    return {in[0], in[1] - k[0]};
  }
  [[nodiscard]] double excess(std::int64_t c) const { return lost_by_rounding<A>(mean, c); }
};

/// What an epilogue activates, v = gamma·(x − mean)·inv_std + beta + residual.
struct activated_channels {
  std::span<double const> mean, inv_std;
  affine_values affine;

  template <class A>
  [[nodiscard]] normalize_coefficients<A> coefficients(std::int64_t channel) const {
    auto const c = static_cast<std::size_t>(channel);
    return make_normalize_coefficients<A>(mean[c], inv_std[c], affine.gamma[c], affine.beta[c]);
  }
};

/// dy·f′(v) and x − mean, of dy, x and the residual.
template <class F, bool Residual>
struct activated_gradient_terms {
  using A = typename F::arithmetic;
  static constexpr std::size_t inputs = Residual ? 3 : 2, coefficients = 3, values = 2;
  activated_channels of;
  F f;

  std::array<A, coefficients> operator()(std::int64_t c) const {
    auto const k = of.coefficients<A>(c);
    return {k.center, k.scale, k.shift};
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                           std::array<V, coefficients> const& k) const {
    V const d = in[1] - k[0];
    V v = multiply_add(d, k[1], k[2]);
    if constexpr (Residual) v = f.add(v, in[2]);
    return {f.gradient(v, in[0]), d};
  }
  [[nodiscard]] double excess(std::int64_t c) const { return lost_by_rounding<A>(of.mean, c); }
};

/// dy·f′(v), x − mean and u, of dy, x, u and the residual, which may be anything where there is none.
template <class A>
struct second_order_terms {
  static constexpr std::size_t inputs = 4, coefficients = 3, values = 3;
  activated_channels of;
  linear_activation<A> f;
  bool has_residual;

  std::array<A, coefficients> operator()(std::int64_t c) const {
    return activated_gradient_terms<linear_activation<A>, false>{of, f}(c);
  }
  template <class V>
  [[nodiscard, gnu::always_inline]] std::array<V, values> apply(std::array<V, inputs> const& in,
                                                                std::array<V, coefficients> const& k) const {
    V const d = in[1] - k[0];
    V activated = multiply_add(d, k[1], k[2]);
    if (has_residual) activated += in[3];
    return {f.gradient(activated, in[0]), d, in[2]};
  }
  [[nodiscard]] double excess(std::int64_t c) const { return lost_by_rounding<A>(of.mean, c); }
};

/// Those of lanes from `first` on, of which each channel has `fold`.
template <class Terms>
struct terms_of_lanes : Terms {
  std::int64_t first = 0, fold = 1;

  auto operator()(std::int64_t lane) const { return Terms::operator()(channel(lane)); }
  [[nodiscard]] double excess(std::int64_t lane) const { return Terms::excess(channel(lane)); }

private:
  /// Dividing takes as long as all else that is done for a lane.
  [[nodiscard]] std::int64_t channel(std::int64_t lane) const {
    return fold == 1 ? first + lane : (first + lane) / fold;
  }
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
