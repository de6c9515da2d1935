#pragma once

#include <complex>
#include <type_traits>

#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::cuda::detail {

/// What kernels know a complex number by, of the same bits.
template <class T>
struct complex_element {
  T re, im;
};

template <class T>
[[nodiscard]] tensor_view<complex_element<T>> complex_view(tensor_view<std::complex<T>> const& x) {
  return {reinterpret_cast<complex_element<T>*>(x.data),
          x.samples,
          x.channels,
          x.spatial,
          x.stride_n,
          x.stride_c,
          x.stride_s};
}
template <class T>
[[nodiscard]] tensor_view<complex_element<T> const> complex_view(tensor_view<std::complex<T> const> const& x) {
  return {reinterpret_cast<complex_element<T> const*>(x.data),
          x.samples,
          x.channels,
          x.spatial,
          x.stride_n,
          x.stride_c,
          x.stride_s};
}

} // namespace syncnorm::cuda::detail
