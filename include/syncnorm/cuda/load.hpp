#pragma once

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/entries.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/kernels.hpp>

// The members of kernels_of that load kernels.
namespace syncnorm::cuda {

namespace detail {

template <class Kernels, class... Entries>
void load() {
  (syncnorm::detail::require_cuda(Kernels::template load<Entries>(), "cudaFuncGetAttributes"), ...);
}

template <class Kernels, class Sums, class Map>
void load_two_launches() {
  load<Kernels, reduce_entry<Sums, axis::positions>, reduce_entry<Sums, axis::channels>,
       map_entry<Map, axis::positions>, map_entry<Map, axis::channels>>();
}

template <class Kernels, class Sums, class Map>
void load_pass() {
  load_two_launches<Kernels, Sums, Map>();
  load<Kernels, fused_entry<Sums, Map, axis::positions>, fused_entry<Sums, Map, axis::channels>>();
}

} // namespace detail

template <class T, class Kernels>
void kernels_of<T, Kernels>::load_kernels() {
  using namespace detail;
  using enum epilogue_kind;
  using D = device_element_t<T>;
  load<Kernels, accept_entry, group_entry, choose_entry, copy_entry<copied_word<T>>>();
  load_pass<Kernels, moments_op<D>, normalize_op<D, none>>();
  load_pass<Kernels, moments_op<D>, normalize_op<D, linear>>();
  load_two_launches<Kernels, moments_op<D>, normalize_op<D, exponential>>();
  load_pass<Kernels, backward_sums_op<D, none>, gradient_op<D, none>>();
  load_pass<Kernels, backward_sums_op<D, linear>, gradient_op<D, linear>>();
  load_two_launches<Kernels, backward_sums_op<D, exponential>, gradient_op<D, exponential>>();
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::load_double_backward_kernels() {
  using namespace detail;
  using D = device_element_t<T>;
  load_two_launches<Kernels, double_backward_sums_op<D, false>, double_gradient_op<D, false>>();
  load_two_launches<Kernels, double_backward_sums_op<D, true>, double_gradient_op<D, true>>();
}

} // namespace syncnorm::cuda
