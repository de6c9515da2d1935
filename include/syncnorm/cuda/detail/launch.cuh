#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/hardware.cuh>
#include <syncnorm/cuda/detail/prepare.hpp>

namespace syncnorm::cuda::detail {

/// The architectures that a source is compiled for. Kernels and their launchers carry them in their names, so that sources
/// compiled for different ones may be linked.
template <int...>
struct architecture_list;
using architectures = architecture_list<__CUDA_ARCH_LIST__>;

/// What kernels know an element type by.
template <class T>
using device_element_t =
    std::conditional_t<format_of<T> == element_format::binary16, __half,
                       std::conditional_t<format_of<T> == element_format::bfloat16, __nv_bfloat16, T>>;

template <class T>
[[nodiscard]] auto device_view(tensor_view<T> const& x) {
  using same = device_element_t<std::remove_const_t<T>>;
  using element_type = std::conditional_t<std::is_const_v<T>, same const, same>;
  return tensor_view<element_type>{
      reinterpret_cast<element_type*>(x.data), x.samples, x.channels, x.spatial, x.stride_n, x.stride_c, x.stride_s};
}

template <class T>
[[nodiscard]] batch_norm_epilogue<device_element_t<T>> device_epilogue(batch_norm_epilogue<T> const& from) {
  return {from.activation, device_view(from.residual), from.mask, from.masked};
}

template <class Op, axis Axis, class Architectures>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(Op::threads,
                                                                        Op::resident[static_cast<int>(Axis)])
    reduce_global(__grid_constant__ reduce_arguments<Op> const a) {
  reduce_kernel<Op, Axis, Op::threads>(hardware{}, a);
}

template <class Op, axis Axis, class Architectures>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(Op::threads,
                                                                        Op::resident[static_cast<int>(Axis)])
    map_global(__grid_constant__ map_arguments<Op> const a) {
  map_kernel<Op, Axis>(hardware{}, a);
}

template <class Arguments>
cudaError_t launch(void (*kernel)(Arguments), std::uint32_t blocks, int threads, Arguments const& a,
                   std::size_t dynamic_shared, cudaStream_t stream) {
  void* parameters[] = {const_cast<void*>(static_cast<void const*>(&a))};
  return cudaLaunchKernel(reinterpret_cast<void const*>(kernel), dim3{std::max(1u, blocks)},
                          dim3{static_cast<unsigned>(threads)}, parameters, dynamic_shared, stream);
}

template <class Architectures, class Op>
cudaError_t launch_reduction(reduce_arguments<Op> const& a, cudaStream_t stream) {
  auto* const kernel = axis_of(a.op.lead()) == axis::positions ? &reduce_global<Op, axis::positions, Architectures>
                                                               : &reduce_global<Op, axis::channels, Architectures>;
  return launch<reduce_arguments<Op>>(kernel, a.cut.groups * a.cut.pieces, a.cut.threads, a, 0, stream);
}

template <class Architectures, class Op>
cudaError_t launch_map(map_arguments<Op> const& a, cudaStream_t stream) {
  auto* const kernel = axis_of(a.op.lead()) == axis::positions ? &map_global<Op, axis::positions, Architectures>
                                                               : &map_global<Op, axis::channels, Architectures>;
  return launch<map_arguments<Op>>(kernel, a.cut.groups * a.cut.pieces, a.cut.threads, a, 0, stream);
}

/// Several blocks to a multiprocessor, as shared memory allows, so that one reads while another writes.
inline constexpr int fused_threads = 256, fused_resident = 3;

template <class Sums, class Map, class Architectures>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(fused_threads, fused_resident)
    fused_global(__grid_constant__ fused_arguments<Sums, Map> const a) {
  fused_kernel<Sums, Map, fused_threads>(hardware{}, a);
}

template <class Architectures, class Sums, class Map>
cudaError_t launch_fused(fused_arguments<Sums, Map> const& a, device_limits const& limits, cudaStream_t stream) {
  auto* const kernel = &fused_global<Sums, Map, Architectures>;
  auto const bytes = static_cast<int>(fused_bytes<Sums>(a.cut));
  // The limit is the kernel's, not the launch's: were it not always the same, a smaller launch by another thread, or after one
  // in the same graph, would make the larger one fail.
  if (bytes > 48 * 1024 - fused_static_bytes) {
    auto const code = cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, most_on_chip(limits));
    if (code != cudaSuccess) return code;
  }
  return launch<fused_arguments<Sums, Map>>(kernel, a.cut.groups, a.cut.threads, a, static_cast<std::size_t>(bytes),
                                            stream);
}

} // namespace syncnorm::cuda::detail
