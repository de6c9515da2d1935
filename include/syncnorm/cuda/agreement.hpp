#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/detail/plan.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>

// The members of kernels_of for what comes between the two kernels of a pass where ranks exchange sums, or in groups.
namespace syncnorm::cuda {

namespace detail {

template <class Kernels>
void launch_accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  operand_check const check{"accept_sums"};
  check.packets(of.headers);
  check.packet(of.merged);
  if (of.weighted != nullptr) check.packet(of.own);
  int const threads = Kernels::threads(accept_entry::threads);
  launch<Kernels, accept_entry>("accept_sums", {accept_blocks(of, threads), threads}, {of, report}, stream);
}

template <class Kernels>
void launch_agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                           cudaStream_t stream) {
  operand_check const check{"agree_on_group"};
  check.packet(headers.data);
  check.require(headers.ranks > 0 && headers.layers > 0, "there are no packets");
  check.require(headers.faults != nullptr && report.fault != nullptr, "there is no memory for faults");
  launch<Kernels, group_entry>("agree_on_group", {1, Kernels::threads(group_entry::threads)},
                               {headers, forward, report}, stream);
}

} // namespace detail

template <class T, class Kernels>
void kernels_of<T, Kernels>::accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  detail::launch_accept_sums<Kernels>(of, report, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                                            cudaStream_t stream) {
  detail::launch_agree_on_group<Kernels>(headers, forward, report, stream);
}

} // namespace syncnorm::cuda
