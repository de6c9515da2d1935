#pragma once

#include <type_traits>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>

namespace syncnorm::cuda::detail {

/// What kernels know a complex number by, of the same bits.
template <class T>
struct complex_element {
  T re, im;
};

/// `Z`: std::complex, or that to be read.
template <class Z>
[[nodiscard]] auto complex_view(tensor_view<Z> const& x) {
  return view_as<as_const_as<Z, complex_element<typename std::remove_const_t<Z>::value_type>>>(x);
}

} // namespace syncnorm::cuda::detail
