#pragma once

#include <cstdint>
#include <span>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_in_blocks.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/double_backward.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/forward_in_blocks.hpp>
#include <syncnorm/host/group_scaling.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/part_after_part.hpp>
#include <syncnorm/host/power_backward.hpp>
#include <syncnorm/host/power_forward.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/recover.hpp>
#include <syncnorm/host/second_moments.hpp>
#include <syncnorm/host/stores.hpp>

// The primitives of the CPU take most of the time that a source with a layer takes to compile. A program of several such
// sources includes this header in each, which then leave the primitives of float, double, float16 and bfloat16 out, and
// has one more source, or one for each element type, which compile at the same time:
//
//     #include <syncnorm/host/compiled_primitives.hpp>
//     SYNCNORM_PRIMITIVES(, float) // and double, syncnorm::float16, syncnorm::bfloat16 as needed

namespace syncnorm::host::detail {

using in_channels = std::span<double const>;
using out_channels = std::span<double>;
using in_combinations = std::span<combination const>;
using finish_channels = function_ref<void(std::int64_t, std::int64_t)>;

} // namespace syncnorm::host::detail

/// Instantiates the primitives of T, or with `extern` says that another source does.
#define SYNCNORM_PRIMITIVES(EXTERN, T)                                                                                 \
  namespace syncnorm::host {                                                                                           \
  EXTERN template void local_moments<T const>(executor_ref, tensor_view<T const>, detail::out_channels,                \
                                              detail::out_channels);                                                   \
  EXTERN template void local_moments<T const>(executor_ref, tensor_view<T const>, prepared_epilogue<T> const&,         \
                                              detail::out_channels, detail::out_channels);                             \
  EXTERN template void normalize<T>(executor_ref, tensor_view<T const>, tensor_view<T>, detail::in_channels,           \
                                    detail::in_channels, affine_values const&, stores, next_block);                    \
  EXTERN template void normalize<T>(executor_ref, tensor_view<T const>, tensor_view<T>, detail::in_channels,           \
                                    detail::in_channels, affine_values const&, prepared_epilogue<T> const&, stores);   \
  EXTERN template void backward_reduce<T const>(executor_ref, tensor_view<T const>, tensor_view<T const>,              \
                                                detail::in_channels, detail::out_channels, detail::out_channels);      \
  EXTERN template void backward_reduce<T const>(executor_ref, tensor_view<T const>, tensor_view<T const>,              \
                                                detail::in_channels, detail::in_channels, affine_values const&,        \
                                                prepared_epilogue<T> const&, detail::out_channels,                     \
                                                detail::out_channels);                                                 \
  EXTERN template void backward_elemt<T>(executor_ref, tensor_view<T const>, tensor_view<T const>, tensor_view<T>,     \
                                         detail::in_channels, detail::in_channels, channel_values const&,              \
                                         detail::in_channels, detail::in_channels, normalized_count, stores,           \
                                         next_block);                                                                  \
  EXTERN template void backward_elemt<T const>(executor_ref, tensor_view<T const>, tensor_view<T const>,               \
                                               tensor_view<T>, tensor_view<T>, detail::in_channels,                    \
                                               detail::in_channels, affine_values const&, detail::in_channels,         \
                                               detail::in_channels, normalized_count, prepared_epilogue<T> const&,     \
                                               stores);                                                                \
  EXTERN template void forward_in_blocks<T>(executor_ref, tensor_view<T const>, tensor_view<T>, detail::out_channels,  \
                                            detail::out_channels, detail::in_channels, affine_values const&,           \
                                            detail::finish_channels, stores);                                          \
  EXTERN template void forward_in_blocks<T>(executor_ref, tensor_view<T const>, tensor_view<T>, detail::out_channels,  \
                                            detail::out_channels, detail::in_channels, affine_values const&,           \
                                            detail::finish_channels, prepared_epilogue<T> const&, stores);             \
  EXTERN template void backward_in_blocks<T>(executor_ref, tensor_view<T const>, tensor_view<T const>, tensor_view<T>, \
                                             detail::in_channels, detail::in_channels, channel_values const&,          \
                                             detail::out_channels, detail::out_channels, normalized_count, stores);    \
  EXTERN template void backward_in_blocks<T const>(executor_ref, tensor_view<T const>, tensor_view<T const>,           \
                                                   tensor_view<T>, tensor_view<T>, detail::in_channels,                \
                                                   detail::in_channels, affine_values const&, detail::out_channels,    \
                                                   detail::out_channels, normalized_count,                             \
                                                   prepared_epilogue<T> const&, stores);                               \
  EXTERN template void normalize_and_local_moments<T>(executor_ref, tensor_view<T const>, tensor_view<T>,              \
                                                      detail::in_channels, detail::in_channels, affine_values const&,  \
                                                      stores, tensor_view<T const>, detail::out_channels,              \
                                                      detail::out_channels, detail::processor const&);                 \
  EXTERN template void backward_elemt_and_reduce<T>(executor_ref, tensor_view<T const>, tensor_view<T const>,          \
                                                    tensor_view<T>, detail::in_channels, detail::in_channels,          \
                                                    channel_values const&, detail::in_channels, detail::in_channels,   \
                                                    normalized_count, stores, tensor_view<T const>,                    \
                                                    tensor_view<T const>, detail::in_channels, detail::out_channels,   \
                                                    detail::out_channels, detail::processor const&);                   \
  EXTERN template void recover<T>(executor_ref, tensor_view<T const>, tensor_view<T>, detail::in_channels,             \
                                  detail::in_channels, affine_values const&, prepared_epilogue<T> const&);             \
  EXTERN template void double_backward_reduce<T>(executor_ref, second_order_operands<T> const&,                        \
                                                 double_backward_sums const&);                                         \
  EXTERN template void double_backward_elemt<T>(executor_ref, second_order_operands<T> const&,                         \
                                                detail::in_combinations, detail::in_combinations);                     \
  EXTERN template void double_backward_in_blocks<T>(executor_ref, second_order_operands<T> const&,                     \
                                                    double_backward_sums const&, detail::in_combinations,              \
                                                    detail::in_combinations, detail::finish_channels);                 \
  EXTERN template void second_moments<T const>(executor_ref, tensor_view<T const>, mask_view const&,                   \
                                               channel_scaling const&, detail::out_channels, detail::out_channels);    \
  EXTERN template void power_normalize<T>(executor_ref, tensor_view<T const>, tensor_view<T>, channel_scaling const&,  \
                                          detail::in_channels, affine_values const&);                                  \
  EXTERN template void power_forward<T>(executor_ref, tensor_view<T const>, tensor_view<T>, mask_view const&,          \
                                        channel_scaling const&, detail::in_channels, affine_values const&,             \
                                        detail::out_channels, detail::out_channels);                                   \
  EXTERN template void power_backward<T>(executor_ref, tensor_view<T const>, tensor_view<T const>, tensor_view<T>,     \
                                         mask_view const&, channel_scaling const&, detail::in_channels,                \
                                         detail::in_channels, detail::out_channels, detail::out_channels);             \
  EXTERN template void group_scaling<T>(executor_ref, tensor_view<T const>, tensor_view<T>, channel_scaling const&);   \
  EXTERN template void group_scaling_backward<T>(executor_ref, tensor_view<T const>, tensor_view<T const>,             \
                                                 tensor_view<T>, channel_scaling const&);                              \
  }

SYNCNORM_PRIMITIVES(extern, float)
SYNCNORM_PRIMITIVES(extern, double)
SYNCNORM_PRIMITIVES(extern, float16)
SYNCNORM_PRIMITIVES(extern, bfloat16)
