#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// dv = dy·f′(gamma·(x − mean)·inv_std + beta + residual), and 0 where the output is 0 by the mask: the gradient of what was
/// activated.
///
/// Shapes: dy, x, dv and the residual `[N, C, S]`, the mask `[N, S]`, the rest `[C]`. Local. dv may be dy.
template <class T>
requires element<T>
void activation_gradient(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                         std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dv, std::span<double const> mean,
                         std::span<double const> inv_std, affine_values const& params,
                         prepared_epilogue<T> const& epilogue) {
  using A = accumulate_t<T>;
  detail::epilogue_gradient_terms<A> const terms{mean, inv_std, params.gamma, params.beta, {}, {}, 0, true};
  if (epilogue.has_residual())
    detail::map_elements<T>(exec, detail::epilogue_gradient_op<A, true, true>{epilogue.slope(), A{0}}, terms,
                            {dy, x, epilogue.residual()}, {dv, detail::nowhere<T>(x)}, epilogue.written(),
                            stores::automatic);
  else
    detail::map_elements<T>(exec, detail::epilogue_gradient_op<A, false, true>{epilogue.slope(), A{0}}, terms, {dy, x},
                            {dv}, epilogue.written(), stores::automatic);
}

} // namespace syncnorm::host
