#pragma once

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::cuda::detail {

/// What kernels know an element type by.
template <class T>
using device_element_t =
    std::conditional_t<format_of<T> == element_format::binary16, __half,
                       std::conditional_t<format_of<T> == element_format::bfloat16, __nv_bfloat16, T>>;

template <class T>
[[nodiscard]] auto device_view(tensor_view<T> const& x) {
  using same = device_element_t<std::remove_const_t<T>>;
  using element_type = std::conditional_t<std::is_const_v<T>, same const, same>;
  return tensor_view<element_type>{
      reinterpret_cast<element_type*>(x.data), x.samples, x.channels, x.spatial, x.stride_n, x.stride_c, x.stride_s};
}

template <class T>
[[nodiscard]] batch_norm_epilogue<device_element_t<T>> device_epilogue(batch_norm_epilogue<T> const& from) {
  return {from.activation, device_view(from.residual), from.mask, from.masked};
}

} // namespace syncnorm::cuda::detail
