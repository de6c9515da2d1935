#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/cuda/detail/accept_kernel.hpp>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/detail/plan.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

namespace detail {

template <class Architectures>
__attribute__((visibility("hidden"))) __global__ void accept_global(__grid_constant__ accept_arguments const a) {
  accept_kernel(hardware{}, a);
}

} // namespace detail

/// Between the allreduces of a pass whose ranks exchange sums: makes `of.merged` of what has come, for the second kernel to take
/// as the packet of one rank. Where ranks disagree, or one has a fault, or `of.arrivals` says that sums have not come from all, writes
/// `report`, and gives that packet a fault. Of moments, an allreduce of the merged m2 has to follow, and of the 1 that it leaves in
/// `of.merged.arrival`.
template <class Architectures = detail::architectures>
void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  syncnorm::detail::require_cuda(detail::launch<detail::accept_arguments>(&detail::accept_global<Architectures>,
                                                                          detail::accept_blocks(of, 256), 256,
                                                                          {of, report}, 0, stream),
                                 "accept_sums");
}

} // namespace syncnorm::cuda
