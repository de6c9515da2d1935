#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/half.hpp>

/// libtorch's 16-bit types as elements. The module's passes take float16 and bfloat16 for them, which have the same bits.
template <>
struct syncnorm::element_traits<c10::Half> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float16";
  static constexpr auto format = element_format::binary16;
};

template <>
struct syncnorm::element_traits<c10::BFloat16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "bfloat16";
  static constexpr auto format = element_format::bfloat16;
};

namespace syncnorm::torch::detail {

template <class T>
struct torch_element {
  using type = T;
};
template <>
struct torch_element<float16> {
  using type = c10::Half;
};
template <>
struct torch_element<bfloat16> {
  using type = c10::BFloat16;
};

/// The first element of `tensor`, whose type is that by which libtorch knows T.
template <class T>
[[nodiscard]] T* elements_of(at::Tensor const& tensor) {
  using element = typename torch_element<T>::type;
  static_assert(sizeof(T) == sizeof(element));
  return reinterpret_cast<T*>(tensor.data_ptr<element>());
}

/// A type of elements and a type of parameters.
template <class T, class P>
struct pass_types {
  using element = T;
  using parameter = P;
};

/// Whether there are passes over elements of this type.
[[nodiscard]] inline bool is_supported(c10::ScalarType element) {
  return element == c10::kFloat || element == c10::kDouble || element == c10::kHalf || element == c10::kBFloat16;
}

/// Whether there are passes over elements and with parameters of these types: parameters are of the type of the elements,
/// or float beside 16-bit elements.
[[nodiscard]] inline bool is_supported(c10::ScalarType element, c10::ScalarType parameter) {
  return is_supported(element) && (parameter == element || (parameter == c10::kFloat && element != c10::kDouble));
}

/// Calls f(pass_types<T, P>{}) for these types; for float where there are no such passes, which a fault then says.
template <class F>
decltype(auto) with_types(c10::ScalarType element, c10::ScalarType parameter, F&& f) {
  bool const mixed = parameter == c10::kFloat;
  switch (element) {
  case c10::kDouble:
    return f(pass_types<double, double>{});
  case c10::kHalf:
    return mixed ? f(pass_types<float16, float>{}) : f(pass_types<float16, float16>{});
  case c10::kBFloat16:
    return mixed ? f(pass_types<bfloat16, float>{}) : f(pass_types<bfloat16, bfloat16>{});
  default:
    return f(pass_types<float, float>{});
  }
}

} // namespace syncnorm::torch::detail
