#pragma once

#include <span>
#include <vector>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>

namespace syncnorm::torch::detail {

using cuda::detail::device_element_t;

template <class T>
[[nodiscard]] auto on_device(tensor_view<T> const& of) {
  return cuda::detail::device_view(of);
}
template <class T>
[[nodiscard]] auto on_device(batch_norm_epilogue<T> const& of) {
  return cuda::detail::device_epilogue(of);
}
template <class T>
[[nodiscard]] std::span<device_element_t<T>> on_device(std::span<T> of) {
  return {reinterpret_cast<device_element_t<T>*>(of.data()), of.size()};
}
template <class P>
[[nodiscard]] affine_parameters<device_element_t<P>> on_device(affine_parameters<P> const& of) {
  return {on_device(of.gamma), on_device(of.beta)};
}

template <class Range>
[[nodiscard]] auto each_on_device(Range const& of) {
  std::vector<decltype(on_device(of[0]))> made;
  for (auto const& each : of) made.push_back(on_device(each));
  return made;
}

} // namespace syncnorm::torch::detail
