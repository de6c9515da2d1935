#pragma once

// CUDA's 16-bit types as elements. Their headers need no CUDA compiler; without them there is nothing to describe. Converted by
// functions, since macros that some programs define, CUDA extensions of PyTorch among them, take away the types' own conversions.
#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>)

#include <string_view>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <syncnorm/config.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/half.hpp>

template <>
struct syncnorm::element_traits<__half> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float16";
  static constexpr auto format = element_format::binary16;
  static SYNCNORM_HOST_DEVICE float to_accumulate(__half value) { return __half2float(value); }
  static SYNCNORM_HOST_DEVICE __half from_accumulate(float sum) { return __float2half_rn(sum); }
};

template <>
struct syncnorm::element_traits<__nv_bfloat16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "bfloat16";
  static constexpr auto format = element_format::bfloat16;
  /// As `__bfloat162float`, in one operation of a word of two.
  static SYNCNORM_HOST_DEVICE float to_accumulate(__nv_bfloat16 value) {
    return detail::from_bfloat16(__bfloat16_as_ushort(value));
  }
  static SYNCNORM_HOST_DEVICE __nv_bfloat16 from_accumulate(float sum) { return __float2bfloat16_rn(sum); }
};

#endif
