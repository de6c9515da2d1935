#pragma once

#include <string>

#include <torch/types.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/torch/detail/backward_call.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/element.hpp>

// As host/compiled_primitives.hpp, for programs of several sources with SyncBatchNorm, which then leave the passes of all types
// out. The module chooses its types as it runs, so one or more other sources have them all, whichever the program uses:
//
//     #include <syncnorm/torch/compiled_passes.hpp>
//     SYNCNORM_PRIMITIVES(, float)          // and double, syncnorm::float16, syncnorm::bfloat16
//     SYNCNORM_TORCH_PASSES(, float, float) // and double, double; of float16 and bfloat16 with themselves and with float

/// Instantiates the passes over elements of T with parameters of P, or with `extern` says that another source does.
#define SYNCNORM_TORCH_PASSES(EXTERN, T, P)                                                                            \
  namespace syncnorm::torch::detail {                                                                                  \
  EXTERN template class prepared_forward_pass<T, P>;                                                                   \
  EXTERN template class typed_forward_pass<T, P>;                                                                      \
  EXTERN template class prepared_backward_call<T, P>;                                                                  \
  EXTERN template class typed_backward_call<T, P>;                                                                     \
  EXTERN template batch_norm_backward_function::tensors                                                                \
  batch_norm_backward_function::run_typed<T, P>(context const&, recorded_pass const&, tensors const&, tensors const&,  \
                                                std::string);                                                          \
  }

SYNCNORM_TORCH_PASSES(extern, float, float)
SYNCNORM_TORCH_PASSES(extern, double, double)
SYNCNORM_TORCH_PASSES(extern, float16, float16)
SYNCNORM_TORCH_PASSES(extern, float16, float)
SYNCNORM_TORCH_PASSES(extern, bfloat16, bfloat16)
SYNCNORM_TORCH_PASSES(extern, bfloat16, float)
