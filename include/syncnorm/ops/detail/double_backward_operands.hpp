#pragma once

#include <span>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>

namespace syncnorm::detail {

/// What a double backward pass reads and writes, of K micro-batches; names as in `batch_norm_double_backward`.
template <class T, class P>
struct double_backward_operands {
  std::span<tensor_view<T const> const> dy, x;
  std::span<tensor_view<T const> const> u, v; ///< none, or K; default views: 0
  std::span<P const> a, b;
  affine_parameters<P> affine;
  std::span<tensor_view<T> const> to_dy, to_x; ///< none, or K; default views: not needed
  std::span<P> gamma_gradient;
  std::span<batch_norm_epilogue<T> const> epilogues;
};

/// What such a pass writes is apart from all that it reads, which it is yet to read for the other output.
template <class T, class P>
void check_outputs_apart(call_check& check, double_backward_operands<T, P> const& of) {
  check_outputs_apart<T>(check, of.x.size(), {"the gradient to dy", of.to_dy}, {"the gradient to x", of.to_x},
                         {{"dy", of.dy},
                          {"x", of.x},
                          {"the gradient with respect to dx", of.u},
                          {"the gradient with respect to dresidual", of.v},
                          named_views<T>{of.epilogues}},
                         false);
}

} // namespace syncnorm::detail
