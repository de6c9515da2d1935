#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/cuda/agreement.hpp>
#include <syncnorm/cuda/backward.hpp>
#include <syncnorm/cuda/complex_passes.hpp>
#include <syncnorm/cuda/detail/hardware.cuh>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/double_backward.hpp>
#include <syncnorm/cuda/forward.hpp>
#include <syncnorm/cuda/in_place.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/load.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

namespace detail {

/// The architectures that a source is compiled for. Kernels and what launches them carry them in their names, so that sources
/// compiled for different ones may be linked.
template <int...>
struct architecture_list;
using architectures = architecture_list<__CUDA_ARCH_LIST__>;

template <int... Compiled>
[[nodiscard]] constexpr bool runs_clusters(architecture_list<Compiled...> const*, int architecture) {
  return runs_clusters<Compiled...>(architecture);
}

template <class Entry, class Architectures>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(Entry::threads, Entry::resident)
    bounded(__grid_constant__ typename Entry::arguments const a) {
  Entry::template run<Entry::threads>(hardware{}, a);
}

template <class Entry, class Architectures>
__attribute__((visibility("hidden"))) __global__ void unbounded(__grid_constant__ typename Entry::arguments const a) {
  Entry::template run<Entry::threads>(hardware{}, a);
}

} // namespace detail

/// The kernels of cuda/, compiled for the architectures of `Architectures`, on GPUs.
template <class Architectures = detail::architectures>
struct gpu_kernels {
  static constexpr bool has_clusters(int architecture) {
    return detail::runs_clusters(static_cast<Architectures const*>(nullptr), architecture);
  }
  static constexpr int threads(int on_gpu) { return on_gpu; }

  template <class Entry>
  static cudaError_t launch(detail::launch_shape const& shape, typename Entry::arguments const& a,
                            cudaStream_t stream) {
    // The limit is the kernel's, not the launch's: were it not always the same, a smaller launch by another thread, or after one
    // in the same graph, would make the larger one fail.
    if (shape.dynamic_shared > 48 * 1024 - shape.static_shared) {
      auto const code = cudaFuncSetAttribute(address<Entry>(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             shape.most_dynamic_shared);
      if (code != cudaSuccess) return code;
    }
    void* parameters[] = {const_cast<void*>(static_cast<void const*>(&a))};
    cudaLaunchAttribute how{};
    bool const early = shape.early && CUDART_VERSION >= 12030; // before, graphs did not take such launches
    if (early) {
      how.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      how.val.programmaticStreamSerializationAllowed = 1;
    } else {
      how.id = cudaLaunchAttributeClusterDimension;
      how.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3{shape.blocks};
    config.blockDim = dim3{static_cast<unsigned>(shape.threads)};
    config.dynamicSmemBytes = static_cast<std::size_t>(shape.dynamic_shared);
    config.stream = stream;
    config.attrs = &how;
    config.numAttrs = early || shape.cluster > 1 ? 1 : 0;
    return cudaLaunchKernelExC(&config, address<Entry>(), parameters);
  }

  template <class Entry>
  static cudaError_t load() {
    cudaFuncAttributes found{};
    return cudaFuncGetAttributes(&found, address<Entry>());
  }

private:
  template <class Entry>
  static void const* address() {
    if constexpr (Entry::resident > 0)
      return reinterpret_cast<void const*>(&detail::bounded<Entry, Architectures>);
    else
      return reinterpret_cast<void const*>(&detail::unbounded<Entry, Architectures>);
  }
};

// The members of kernels_of on GPUs, as the primitives of the host are called.
template <class T, class Architectures = detail::architectures>
inline constexpr auto& load_kernels = kernels_of<T, gpu_kernels<Architectures>>::load_kernels;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& load_double_backward_kernels =
    kernels_of<T, gpu_kernels<Architectures>>::load_double_backward_kernels;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& local_moments = kernels_of<T, gpu_kernels<Architectures>>::local_moments;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& normalize = kernels_of<T, gpu_kernels<Architectures>>::normalize;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& normalize_constant = kernels_of<T, gpu_kernels<Architectures>>::normalize_constant;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& forward_alone = kernels_of<T, gpu_kernels<Architectures>>::forward_alone;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& backward_reduce = kernels_of<T, gpu_kernels<Architectures>>::backward_reduce;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& backward_elemt = kernels_of<T, gpu_kernels<Architectures>>::backward_elemt;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& backward_alone = kernels_of<T, gpu_kernels<Architectures>>::backward_alone;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& backward_constant = kernels_of<T, gpu_kernels<Architectures>>::backward_constant;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& double_backward_reduce = kernels_of<T, gpu_kernels<Architectures>>::double_backward_reduce;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& double_backward_elemt = kernels_of<T, gpu_kernels<Architectures>>::double_backward_elemt;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& keep = kernels_of<T, gpu_kernels<Architectures>>::keep;
template <class T, class Architectures = detail::architectures>
inline constexpr auto& recover = kernels_of<T, gpu_kernels<Architectures>>::recover;
template <class Architectures = detail::architectures>
void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  kernels_of<float, gpu_kernels<Architectures>>::accept_sums(of, report, stream);
}
template <class Architectures = detail::architectures>
void agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report, cudaStream_t stream) {
  kernels_of<float, gpu_kernels<Architectures>>::agree_on_group(headers, forward, report, stream);
}

} // namespace syncnorm::cuda
