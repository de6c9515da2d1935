#pragma once

// CUDA's 16-bit types as elements. Their headers need no CUDA compiler; without them there is nothing to describe.
#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>)

#include <string_view>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <syncnorm/core/element.hpp>

template <>
struct syncnorm::element_traits<__half> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float16";
  static constexpr auto format = element_format::binary16;
};

template <>
struct syncnorm::element_traits<__nv_bfloat16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "bfloat16";
  static constexpr auto format = element_format::bfloat16;
};

#endif
