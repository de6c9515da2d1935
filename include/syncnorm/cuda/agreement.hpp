#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/detail/plan.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>

// The members of kernels_of for what comes between the two kernels of a pass where ranks exchange sums, or in groups.
namespace syncnorm::cuda {

template <class T, class Kernels>
void kernels_of<T, Kernels>::accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  using entry = detail::accept_entry;
  int const threads = Kernels::threads(entry::threads);
  detail::launch<Kernels, entry>("accept_sums", {detail::accept_blocks(of, threads), threads}, {of, report}, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                                            cudaStream_t stream) {
  using entry = detail::group_entry;
  detail::launch<Kernels, entry>("agree_on_group", {1, Kernels::threads(entry::threads)}, {headers, forward, report},
                                 stream);
}

} // namespace syncnorm::cuda
