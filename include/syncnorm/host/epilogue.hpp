#pragma once

#include <array>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/activation.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/map_elements.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/masked_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

namespace detail {

/// Stands for an output like `x` that is not needed.
template <class T>
[[nodiscard]] tensor_view<T> nowhere(tensor_view<T const> const& x) {
  return {nullptr, x.samples, x.channels, x.spatial, x.stride_n, x.stride_c, x.stride_s};
}

/// Whether a backward pass writes neither gradient: dx is without data, and dresidual is, or there is no residual.
template <class T>
[[nodiscard]] bool writes_no_gradient(tensor_view<T> const& dx, tensor_view<T> const& dresidual, bool has_residual) {
  return dx.data == nullptr && (dresidual.data == nullptr || !has_residual);
}

/// Calls f(activation, whether a residual is among the tensors), the latter as a `std::bool_constant`.
template <class T, class F>
void with_activation(prepared_epilogue<T> const& epilogue, F const& f) {
  using A = accumulate_t<T>;
  auto const& of = epilogue.activation();
  if (of.exponential)
    f(exponential_activation<A>{of, epilogue.has_residual()}, std::true_type{});
  else if (epilogue.has_residual())
    f(linear_activation<A>{of}, std::true_type{});
  else
    f(linear_activation<A>{of}, std::false_type{});
}

} // namespace detail

/// Moments of the positions that count; `masked_moments.hpp`.
template <class X>
requires element<X>
void local_moments(executor_ref exec, tensor_view<X> x, prepared_epilogue<std::remove_const_t<X>> const& epilogue,
                   std::span<double> mean, std::span<double> m2) {
  if (epilogue.is_transposed())
    local_moments(exec, detail::transposed(x), epilogue.of_transposed(), mean, m2);
  else if (epilogue.counted() == nullptr)
    local_moments(exec, x, mean, m2);
  else
    detail::masked_moments<std::remove_const_t<X>>(exec, x, *epilogue.counted(), mean, m2);
}

/// y = f(gamma·(x − mean)·inv_std + beta + residual), or 0 where the mask and `masked` say so; `batch_norm_epilogue`.
///
/// Shapes: x, y and the residual `[N, C, S]`, the mask `[N, S]`, the rest `[C]`. Local. y may be x or the residual. `how`:
/// see `normalize`.
template <class T>
requires element<T>
void normalize(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
               std::span<double const> mean, std::span<double const> inv_std, affine_values const& params,
               std::type_identity_t<prepared_epilogue<T>> const& epilogue, stores how = stores::automatic) {
  if (!epilogue.does_something()) return normalize(exec, x, y, mean, inv_std, params, how);
  if (epilogue.is_transposed())
    return normalize(exec, detail::transposed(x), detail::transposed(y), mean, inv_std, params,
                     epilogue.of_transposed(), how);
  using A = accumulate_t<T>;
  detail::normalize_terms<A> const terms{mean, inv_std, params.gamma, params.beta};
  detail::with_activation(epilogue, [&]<class F, bool Residual>(F const& f, std::bool_constant<Residual>) {
    detail::epilogue_op<F, Residual> const op{f};
    std::array<tensor_view<T const>, op.inputs> in{x};
    if constexpr (Residual) in[1] = epilogue.residual_or(x);
    detail::map_elements<T>(exec, op, terms, in, {y}, epilogue.written(), how);
  });
}

/// The sums of the backward pass, over the N·S elements of each channel:
///
///     sum_dy[c] = Σ dv,  sum_dy_xmu[c] = Σ dv·(x − mean[c])
///
/// where dv is the gradient of what was activated, dy·f′(gamma·(x − mean)·inv_std + beta + residual), and 0 where the output
/// is 0 by the mask. Positions that do not count are part of the sums if their outputs are normalized.
///
/// Shapes: dy, x and the residual `[N, C, S]`, the mask `[N, S]`, the rest `[C]`. Local. The same bits whatever the executor.
template <class X>
requires element<X>
void backward_reduce(executor_ref exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                     std::span<double const> mean, std::span<double const> inv_std, affine_values const& params,
                     prepared_epilogue<std::remove_const_t<X>> const& epilogue, std::span<double> sum_dy,
                     std::span<double> sum_dy_xmu) {
  using T = std::remove_const_t<X>;
  using A = accumulate_t<T>;
  if (epilogue.is_transposed())
    return backward_reduce(exec, detail::transposed(dy), detail::transposed(x), mean, inv_std, params,
                           epilogue.of_transposed(), sum_dy, sum_dy_xmu);
  if (epilogue.activation().is_identity())
    return detail::reduce_products<T>(exec, detail::gradient_terms<A>{mean}, {dy, x}, epilogue.written(),
                                      {sum_dy.data(), sum_dy_xmu.data()});
  detail::with_activation(epilogue, [&]<class F, bool Residual>(F const& f, std::bool_constant<Residual>) {
    detail::activated_gradient_terms<F, Residual> const terms{{mean, inv_std, params}, f};
    std::array<tensor_view<T const>, terms.inputs> in{dy, x};
    if constexpr (Residual) in[2] = epilogue.residual_or(x);
    detail::reduce_products<T>(exec, terms, in, epilogue.written(), {sum_dy.data(), sum_dy_xmu.data()});
  });
}

/// The gradients of the input and of the residual,
///
///     dresidual = dv,  dx = gamma·inv_std·(dv − m·(sum_dy/count + (x − mean)·inv_std²·sum_dy_xmu/count))
///
/// where m is 1 at positions that count and 0 elsewhere, and count that of the positions that count over all ranks; by the unbiased
/// variance the latter is count − 1. count = 0 stands for constant statistics.
///
/// Shapes: see `backward_reduce`. Local. dx and dresidual may each be dy, x or the residual; without data they are not
/// needed. `how`: see `normalize`.
template <class X>
requires element<X>
void backward_elemt(executor_ref exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                    std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx,
                    std::type_identity_t<tensor_view<std::remove_const_t<X>>> dresidual, std::span<double const> mean,
                    std::span<double const> inv_std, affine_values const& params, std::span<double const> sum_dy,
                    std::span<double const> sum_dy_xmu, normalized_count count,
                    prepared_epilogue<std::remove_const_t<X>> const& epilogue, stores how = stores::automatic) {
  using T = std::remove_const_t<X>;
  if (!epilogue.does_something()) {
    if (dx.data != nullptr)
      backward_elemt<T>(exec, dy, x, dx, mean, inv_std, params.gamma, sum_dy, sum_dy_xmu, count, how);
    return;
  }
  if (detail::writes_no_gradient(dx, dresidual, epilogue.has_residual())) return;
  if (epilogue.is_transposed())
    return backward_elemt(exec, detail::transposed(dy), detail::transposed(x), detail::transposed(dx),
                          detail::transposed(dresidual), mean, inv_std, params, sum_dy, sum_dy_xmu, count,
                          epilogue.of_transposed(), how);
  using A = accumulate_t<T>;
  A const uncounted = epilogue.written() == nullptr ? A{1} : A{0};
  if (dx.data == nullptr) dx = detail::nowhere<T>(x);
  detail::epilogue_gradient_terms<A> const terms{mean, inv_std, params.gamma, params.beta, sum_dy, sum_dy_xmu, count};
  if (dresidual.data == nullptr) dresidual = detail::nowhere<T>(x);
  detail::with_activation(epilogue, [&]<class F, bool Residual>(F const& f, std::bool_constant<Residual>) {
    detail::epilogue_gradient_op<F, Residual> const op{f, uncounted, count.n == 0};
    std::array<tensor_view<T const>, op.inputs> in{dy, x};
    std::array<tensor_view<T>, op.outputs> out{dx};
    if constexpr (Residual) in[2] = epilogue.activated_residual(x), out[1] = dresidual;
    detail::map_elements<T>(exec, op, terms, in, out, epilogue.counted(), how);
  });
}

} // namespace syncnorm::host
