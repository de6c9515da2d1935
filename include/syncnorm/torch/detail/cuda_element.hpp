#pragma once

#include <span>
#include <type_traits>
#include <vector>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::torch::detail {

template <class T>
struct device_element {
  using type = T;
};
template <>
struct device_element<float16> {
  using type = __half;
};
template <>
struct device_element<bfloat16> {
  using type = __nv_bfloat16;
};
template <class T>
struct device_element<T const> {
  using type = typename device_element<T>::type const;
};

/// The type by which kernels know `T`, of the same bits.
template <class T>
using device_element_t = typename device_element<T>::type;

template <class T>
[[nodiscard]] tensor_view<device_element_t<T>> on_device(tensor_view<T> const& of) {
  return {reinterpret_cast<device_element_t<T>*>(of.data),
          of.samples,
          of.channels,
          of.spatial,
          of.stride_n,
          of.stride_c,
          of.stride_s};
}
template <class T>
[[nodiscard]] std::span<device_element_t<T>> on_device(std::span<T> of) {
  return {reinterpret_cast<device_element_t<T>*>(of.data()), of.size()};
}

template <class T>
[[nodiscard]] batch_norm_epilogue<device_element_t<T>> on_device(batch_norm_epilogue<T> const& of) {
  return {of.activation, on_device(of.residual), of.mask, of.masked};
}

template <class Range>
[[nodiscard]] auto each_on_device(Range const& of) {
  std::vector<decltype(on_device(of[0]))> made;
  for (auto const& each : of) made.push_back(on_device(each));
  return made;
}

template <class P>
[[nodiscard]] affine_parameters<device_element_t<P>> on_device(affine_parameters<P> const& of) {
  return {on_device(of.gamma), on_device(of.beta)};
}

} // namespace syncnorm::torch::detail
