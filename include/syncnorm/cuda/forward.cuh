#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/launch_forward.cuh>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The forward pass as kernels on a stream: local_moments, an allgather of packets, normalize. Nothing here allocates,
// synchronizes or copies to the host, so all of it may be captured in a graph. Every pointer is of device memory. Throws
// invalid_argument_error for what no kernel can take, and cuda_error where a launch fails.
namespace syncnorm::cuda {

/// Writes the packet of this rank: `header`, with its count made of the mask if there is one, and mean and m2 of each channel
/// over the positions that count. Of a header with a fault nothing but the header is written.
///
/// x `[N, C, S]`, mask `[N, S]`, packet `packet_bytes(C)`, aligned to 8 bytes.
template <class T, class Architectures = detail::architectures>
void local_moments(tensor_view<T const> x, mask_view mask, syncnorm::detail::packet_header const& header,
                   packet_place const& packet, workspace const& work, device_limits const& limits,
                   cudaStream_t stream) {
  detail::operand_check const check{"local_moments"};
  check.tensor(x, "x");
  check.epilogue<std::remove_const_t<T>>({.mask = mask}, x);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  syncnorm::detail::require_cuda(
      detail::launch_local_moments<Architectures>(detail::device_view(x), mask, header, packet, work, limits, stream),
      "local_moments");
}

/// Merges the packets in rank order, writes `saved`, moves the running statistics and their counter as `options` says,
/// and normalizes,
///
///     y = f(gamma·(x − mean)·inv_std + beta + residual)     or 0; `batch_norm_epilogue`
///
/// Where a packet has a fault, packets disagree, or there is one value per channel in all, it writes `report` and
/// saved.count = −1 and nothing else. Shapes: x, y and the residual `[N, C, S]`, the mask `[N, S]`. y may be x or the
/// residual. `work` is that of local_moments.
template <class T, class Architectures = detail::architectures>
void normalize(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
               batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
               gathered_packets const& packets, saved_statistics const& saved, running_outputs const& running,
               fault_report const& report, workspace const& work, device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"normalize"};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.epilogue(epilogue, x);
  check.packets(packets);
  check.saved(saved, x.channels);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::workspace_layout const layout{work, x.channels};
  auto const statistics = detail::make_statistics(affine, options, packets, saved, running, report, layout.pass_ticket);
  syncnorm::detail::require_cuda(detail::launch_normalize<Architectures>(detail::device_view(x), detail::device_view(y),
                                                                         detail::device_epilogue(epilogue), statistics,
                                                                         limits, stream),
                                 "normalize");
}

/// The same by the running statistics, as in evaluation. `saved`, with its count 0, may be absent. Where `kept_state` is given and
/// holds −1, y is not written, and `report` says so.
template <class T, class Architectures = detail::architectures>
void normalize_constant(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
                        batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
                        channel_values const& running_mean, channel_values const& running_var,
                        saved_statistics const& saved, std::int64_t const* kept_state, fault_report const& report,
                        device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"normalize_constant"};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.epilogue(epilogue, x);
  check.require((running_mean.data != nullptr && running_var.data != nullptr) || x.channels == 0,
                "the running statistics are null");
  running_outputs running; // which are read alone
  running.mean.data = const_cast<void*>(running_mean.data), running.mean.kind = running_mean.kind;
  running.var.data = const_cast<void*>(running_var.data), running.var.kind = running_var.kind;
  auto const statistics = detail::make_statistics(affine, options, {}, saved, running, report, nullptr, kept_state);
  syncnorm::detail::require_cuda(detail::launch_normalize<Architectures>(detail::device_view(x), detail::device_view(y),
                                                                         detail::device_epilogue(epilogue), statistics,
                                                                         limits, stream),
                                 "normalize_constant");
}

/// local_moments and normalize of one rank alone; in one launch, which reads x once, where the channels fit on the chip.
/// `packet` is scratch.
template <class T, class Architectures = detail::architectures>
void forward_alone(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
                   batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
                   syncnorm::detail::packet_header const& header, packet_place const& packet,
                   saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                   workspace const& work, device_limits const& limits, cudaStream_t stream) {
  detail::moments_op<detail::device_element_t<T>> const sums{detail::device_view(x), epilogue.mask};
  if (header.fault[0] == '\0' && detail::fits_on_chip(sums, detail::fused_threads, limits)) {
    detail::operand_check const check{"forward_alone"};
    check.tensor(x, "x");
    check.like(y, "y", x);
    check.epilogue(epilogue, x);
    check.packet(packet);
    check.saved(saved, x.channels);
    check.work(work, workspace_bytes(x.channels, limits));
    detail::workspace_layout const layout{work, x.channels};
    auto const statistics = detail::make_statistics(affine, options, own_packet(packet), saved, running, report,
                                                    layout.pass_ticket, packet.kept_state);
    syncnorm::detail::require_cuda(detail::launch_forward_on_chip<Architectures>(
                                       detail::device_view(x), detail::device_view(y),
                                       detail::device_epilogue(epilogue), statistics, header, packet, limits, stream),
                                   "forward_alone");
    return;
  }
  local_moments<T, Architectures>(x, epilogue.mask, header, packet, work, limits, stream);
  normalize<T, Architectures>(x, y, affine, epilogue, options, own_packet(packet), saved, running, report, work, limits,
                              stream);
}

} // namespace syncnorm::cuda
