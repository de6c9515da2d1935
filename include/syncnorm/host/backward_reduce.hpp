#pragma once

#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host {

/// The sums of the backward pass over the N·S elements of each channel:
///
///     sum_dy[c] = Σ dy,  sum_dy_xmu[c] = Σ dy·(x − mean[c])
///
/// Shapes: dy and x `[N, C, S]`, the rest `[C]`. Local. The same bits whatever the executor.
template <class X>
requires element<X>
void backward_reduce(executor_ref exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                     std::span<double const> mean, std::span<double> sum_dy, std::span<double> sum_dy_xmu) {
  using T = std::remove_const_t<X>;
  detail::reduce_products<T>(exec, detail::gradient_terms<accumulate_t<T>>{mean}, {dy, x}, nullptr,
                             {sum_dy.data(), sum_dy_xmu.data()});
}

} // namespace syncnorm::host
