#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/cuda/detail/group_kernel.hpp>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

namespace detail {

template <class Architectures>
__attribute__((visibility("hidden"))) __global__ void group_global(__grid_constant__ group_arguments const a) {
  group_kernel(hardware{}, a);
}

} // namespace detail

/// Before the second kernels of a group's layers: where ranks disagree on a layer, or one has a fault, or `forward` and there is
/// one value per channel in all, writes `report`, whose headers are of all ranks and layers, and gives every layer's packet a
/// fault.
template <class Architectures = detail::architectures>
void agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report, cudaStream_t stream) {
  syncnorm::detail::require_cuda(detail::launch<detail::group_arguments>(&detail::group_global<Architectures>, 1, 128,
                                                                         {headers, forward, report}, 0, stream),
                                 "agree_on_group");
}

} // namespace syncnorm::cuda
