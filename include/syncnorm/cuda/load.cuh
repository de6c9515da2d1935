#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/cuda/accept_sums.cuh>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/group.cuh>
#include <syncnorm/cuda/in_place.cuh>

namespace syncnorm::cuda {

namespace detail {

template <class Arguments>
void load(void (*kernel)(Arguments)) {
  cudaFuncAttributes found{};
  syncnorm::detail::require_cuda(cudaFuncGetAttributes(&found, reinterpret_cast<void const*>(kernel)),
                                 "cudaFuncGetAttributes");
}

template <class Sums, class Map, class Architectures>
void load_two_launches() {
  load(&reduce_global<Sums, axis::positions, Architectures>);
  load(&reduce_global<Sums, axis::channels, Architectures>);
  load(&map_global<Map, axis::positions, Architectures>);
  load(&map_global<Map, axis::channels, Architectures>);
}

template <class Sums, class Map, class Architectures>
void load_pass() {
  load_two_launches<Sums, Map, Architectures>();
  load(&fused_global<Sums, Map, Architectures>);
}

} // namespace detail

/// Loads the kernels of forward and backward passes on the current device, in place and in groups, too. CUDA else loads each at
/// its first launch, which may wait until the device is done with all it has, collectives among that which wait for another rank,
/// and which a capture may not allow.
template <class T, class Architectures = detail::architectures>
void load_kernels() {
  using D = detail::device_element_t<T>;
  detail::load(&detail::accept_global<Architectures>);
  detail::load(&detail::group_global<Architectures>);
  detail::load(&detail::choose_global<Architectures>);
  detail::load(&detail::copy_global<detail::copied_word<T>, Architectures>);
  detail::load_pass<detail::moments_op<D>, detail::normalize_op<D, false>, Architectures>();
  detail::load_pass<detail::moments_op<D>, detail::normalize_op<D, true>, Architectures>();
  detail::load_pass<detail::backward_sums_op<D, false>, detail::gradient_op<D, false>, Architectures>();
  detail::load_pass<detail::backward_sums_op<D, true>, detail::gradient_op<D, true>, Architectures>();
}

/// The same of double backward passes.
template <class T, class Architectures = detail::architectures>
void load_double_backward_kernels() {
  using D = detail::device_element_t<T>;
  detail::load_two_launches<detail::double_backward_sums_op<D, false>, detail::double_gradient_op<D, false>,
                            Architectures>();
  detail::load_two_launches<detail::double_backward_sums_op<D, true>, detail::double_gradient_op<D, true>,
                            Architectures>();
}

} // namespace syncnorm::cuda
