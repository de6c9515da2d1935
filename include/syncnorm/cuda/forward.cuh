#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

// The forward pass as kernels on a stream: local_moments, an allgather of packets, normalize. Nothing here allocates,
// synchronizes or copies to the host, so all of it may be captured in a graph. Every pointer is of device memory. Throws
// invalid_argument_error for what no kernel can take, and cuda_error where a launch fails.
namespace syncnorm::cuda {

/// Writes the packet of this rank: `header`, with its count made of the mask if there is one, and mean and m2 of each channel
/// over the positions that count. Of a header with a fault nothing but the header is written.
///
/// x `[N, C, S]`, mask `[N, S]`, packet `packet_bytes(C)`, aligned to 8 bytes.
template <class T>
void local_moments(tensor_view<T const> x, mask_view mask, syncnorm::detail::packet_header const& header,
                   std::byte* packet, workspace const& work, device_limits const& limits, cudaStream_t stream);

/// Merges the packets in rank order, writes `saved`, moves the running statistics and their counter as `options` says,
/// and normalizes,
///
///     y = f(gamma·(x − mean)·inv_std + beta + residual)     or 0; `batch_norm_epilogue`
///
/// Where a packet has a fault, packets disagree, or there is one value per channel in all, it writes `report` and
/// saved.count = −1 and nothing else. Shapes: x, y and the residual `[N, C, S]`, the mask `[N, S]`. y may be x or the
/// residual. `work` is that of local_moments.
template <class T>
void normalize(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
               batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
               gathered_packets const& packets, saved_statistics const& saved, running_outputs const& running,
               fault_report const& report, workspace const& work, device_limits const& limits, cudaStream_t stream);

/// The same by the running statistics, as in evaluation. `saved`, with its count 0, may be absent.
template <class T>
void normalize_constant(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
                        batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
                        channel_values const& running_mean, channel_values const& running_var,
                        saved_statistics const& saved, device_limits const& limits, cudaStream_t stream);

/// local_moments and normalize of one rank alone; in one launch, which reads x once, where the channels fit on the chip.
/// `packet` is scratch.
template <class T>
void forward_alone(tensor_view<T const> x, tensor_view<T> y, affine_values const& affine,
                   batch_norm_epilogue<T> const& epilogue, batch_norm_options const& options,
                   syncnorm::detail::packet_header const& header, std::byte* packet, saved_statistics const& saved,
                   running_outputs const& running, fault_report const& report, workspace const& work,
                   device_limits const& limits, cudaStream_t stream);

} // namespace syncnorm::cuda
