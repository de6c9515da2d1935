#pragma once

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::cuda::detail {

template <class T, class As>
using as_const_as = std::conditional_t<std::is_const_v<T>, As const, As>;

/// What kernels know an element type by, of the same bits.
template <class T>
using device_element_t =
    std::conditional_t<format_of<T> == element_format::binary16, as_const_as<T, __half>,
                       std::conditional_t<format_of<T> == element_format::bfloat16, as_const_as<T, __nv_bfloat16>, T>>;

/// The same of elements `As`, of the same size.
template <class As, class T>
[[nodiscard]] tensor_view<As> view_as(tensor_view<T> const& x) {
  static_assert(sizeof(As) == sizeof(T));
  return {reinterpret_cast<As*>(x.data), x.samples, x.channels, x.spatial, x.stride_n, x.stride_c, x.stride_s};
}

template <class T>
[[nodiscard]] tensor_view<device_element_t<T>> device_view(tensor_view<T> const& x) {
  return view_as<device_element_t<T>>(x);
}

template <class T>
[[nodiscard]] batch_norm_epilogue<device_element_t<T>> device_epilogue(batch_norm_epilogue<T> const& from) {
  return {from.activation, device_view(from.residual), from.mask, from.masked};
}

} // namespace syncnorm::cuda::detail
