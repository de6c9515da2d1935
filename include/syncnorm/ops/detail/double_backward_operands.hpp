#pragma once

#include <span>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

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

} // namespace syncnorm::detail
