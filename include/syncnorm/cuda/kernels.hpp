#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// Kernels that another source has, for a compiler that knows no CUDA. A program that uses them has one source for nvcc, or one for
/// each element type, which compile at the same time:
///
///     #include <syncnorm/cuda/compiled_kernels.cuh>
///     template struct syncnorm::cuda::kernels_of<float>; // and double, __half, __nv_bfloat16 as needed
struct compiled_kernels;

/// The local primitives of elements `T` as kernels on a stream, which `Kernels` launches: `gpu_kernels` or `compiled_kernels`. A pass
/// is local_moments, an allgather of packets, normalize; backward backward_reduce, an allgather, backward_elemt.
///
/// Nothing here but the loading allocates, synchronizes or copies to the host, so all of it may be captured in a graph. Every pointer
/// is of device memory. Throws invalid_argument_error for what no kernel can take, and cuda_error where a launch fails.
template <class T, class Kernels = compiled_kernels>
struct kernels_of {
  using in = tensor_view<T const>;
  using out = tensor_view<T>;
  using epilogue = batch_norm_epilogue<T>;
  using header = syncnorm::detail::packet_header;

  /// Loads the kernels of forward and backward passes on the current device, in place and in groups, too. CUDA else loads each at
  /// its first launch, which may wait until the device is done with all it has, collectives among that which wait for another rank,
  /// and which a capture may not allow.
  static void load_kernels();
  /// The same of double backward passes.
  static void load_double_backward_kernels();

  /// Writes the packet of this rank: `own`, with its count made of the mask if there is one, and mean and m2 of each channel over
  /// the positions that count. Of a header with a fault nothing but the header is written.
  ///
  /// x `[N, C, S]`, mask `[N, S]`, packet `packet_bytes(C)`, aligned to 8 bytes.
  static void local_moments(in x, mask_view mask, header const& own, packet_place const& packet, workspace const& work,
                            device_limits const& limits, cudaStream_t stream);

  /// Merges the packets in rank order, writes `saved`, moves the running statistics and their counter as `options` says,
  /// and normalizes,
  ///
  ///     y = f(gamma·(x − mean)·inv_std + beta + residual)     or 0; `batch_norm_epilogue`
  ///
  /// Where a packet has a fault, packets disagree, or there is one value per channel in all, it writes `report` and
  /// saved.count = −1 and nothing else. Shapes: x, y and the residual `[N, C, S]`, the mask `[N, S]`. y may be x or the
  /// residual. `work` is that of local_moments.
  static void normalize(in x, out y, affine_values const& affine, epilogue const& done,
                        batch_norm_options const& options, gathered_packets const& packets,
                        saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                        workspace const& work, device_limits const& limits, cudaStream_t stream);

  /// The same by the running statistics, as in evaluation. `saved`, with its count 0, may be absent. Where `kept_state` is given and
  /// holds −1, y is not written, and `report` says so.
  static void normalize_constant(in x, out y, affine_values const& affine, epilogue const& done,
                                 batch_norm_options const& options, channel_values const& running_mean,
                                 channel_values const& running_var, saved_statistics const& saved,
                                 std::int64_t const* kept_state, fault_report const& report,
                                 device_limits const& limits, cudaStream_t stream);

  /// local_moments and normalize of one rank alone; in one launch, which reads x once, where the channels fit on the chip.
  /// `packet` is scratch.
  static void forward_alone(in x, out y, affine_values const& affine, epilogue const& done,
                            batch_norm_options const& options, header const& own, packet_place const& packet,
                            saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                            workspace const& work, device_limits const& limits, cudaStream_t stream);

  /// Writes the packet of this rank: `own`, and of each channel
  ///
  ///     sum_dy = Σ dv,  sum_dy_xmu = Σ dv·(x − mean),  dv = dy·f′(gamma·(x − mean)·inv_std + beta + residual)
  ///
  /// where dv is 0 where the mask makes the output 0. If the forward pass failed, saved.count = −1, the packet gets a fault.
  /// dy, x and the residual `[N, C, S]`, the mask `[N, S]`.
  static void backward_reduce(in dy, in x, affine_values const& affine, epilogue const& done,
                              saved_statistics const& saved, header const& own, packet_place const& packet,
                              workspace const& work, device_limits const& limits, cudaStream_t stream);

  /// Adds the packets in rank order, adds inv_std·sum_dy_xmu and sum_dy of `own`, this rank's packet, to the gradients of
  /// gamma and beta, and writes, of all ranks' sums and saved.count,
  ///
  ///     dresidual = dv,  dx = gamma·inv_std·(dv − m·(sum_dy/count + (x − mean)·inv_std²·sum_dy_xmu/count))
  ///
  /// where m is 1 at positions that count and 0 elsewhere, and by the unbiased variance, saved.normalized_by, the latter count is one
  /// less; dx = gamma·inv_std·dv where the count is 0. Without exchange,
  /// `packets` is `own` alone. A default dx or dresidual is not needed; each may be dy, x or the residual, but not the other.
  /// Where packets disagree or have a fault it writes `report` and nothing else.
  static void backward_elemt(in dy, in x, out dx, out dresidual, affine_values const& affine, epilogue const& done,
                             saved_statistics const& saved, gathered_packets const& packets, packet_place const& own,
                             affine_outputs const& gradients, fault_report const& report, device_limits const& limits,
                             cudaStream_t stream);

  /// backward_reduce and backward_elemt without exchange, of one rank alone or of a step that does not exchange; in one launch,
  /// which reads dy and x once, where the channels fit on the chip. `packet` is scratch.
  static void backward_alone(in dy, in x, out dx, out dresidual, affine_values const& affine, epilogue const& done,
                             saved_statistics const& saved, header const& own, packet_place const& packet,
                             affine_outputs const& gradients, fault_report const& report, workspace const& work,
                             device_limits const& limits, cudaStream_t stream);

  /// dx and dresidual of backward_elemt where statistics are constant, saved.count = 0, and no gradients of gamma and beta are wanted:
  /// dx = gamma·inv_std·dv. x is read where there is an epilogue.
  static void backward_constant(in dy, in x, out dx, out dresidual, affine_values const& affine, epilogue const& done,
                                saved_statistics const& saved, device_limits const& limits, cudaStream_t stream);

  /// Writes the packet of this rank for double backward, by the formulae of ops/batch_norm_double_backward.hpp, of seven values a
  /// channel: `packet_bytes(C, 7)`. `done` is the epilogue of the forward pass.
  static void double_backward_reduce(second_order<T> const& second, in dy, in x, affine_values const& affine,
                                     epilogue const& done, saved_statistics const& saved, header const& own,
                                     packet_place const& packet, workspace const& work, device_limits const& limits,
                                     cudaStream_t stream);

  /// Writes the gradients to dy and x, and adds that to gamma, of which each may be absent. to_dy and to_x are neither each
  /// other nor an input.
  static void double_backward_elemt(second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                    affine_values const& affine, epilogue const& done, saved_statistics const& saved,
                                    gathered_packets const& packets, packet_place const& own,
                                    channel_outputs const& gamma_gradient, fault_report const& report,
                                    device_limits const& limits, cudaStream_t stream);

  /// Of a pass over x itself: chooses the channels of x that `is_recoverable` says no of, and copies them to `kept`; where they are
  /// more than there is room for, sets kept.state[0] to −1 and copies nothing. x `[N, C, S]`.
  static void keep(out x, affine_values const& affine, activation const& of, kept_channels const& kept,
                   device_limits const& limits, cudaStream_t stream);

  /// Makes y, which a forward pass wrote over x, x again, up to rounding, in the channels that `keep` has not kept, and copies the
  /// others back; nothing where the forward pass failed, or `kept.once` and x is there. What its mask made 0 becomes anything. y and
  /// the residual `[N, C, S]`.
  static void recover(out y, epilogue const& done, affine_values const& affine, saved_statistics const& saved,
                      kept_channels const& kept, device_limits const& limits, cudaStream_t stream);

  /// Between the allreduces of a pass whose ranks exchange sums: makes `of.merged` of what has come, for the second kernel to take
  /// as the packet of one rank. Where ranks disagree, or one has a fault, or `of.arrivals` says that sums have not come from all,
  /// writes `report`, and gives that packet a fault. Of moments, an allreduce of the merged m2 has to follow, and of the 1 that it
  /// leaves in `of.merged.arrival`.
  static void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream);

  /// Before the second kernels of a group's layers: where ranks disagree on a layer, or one has a fault, or `forward` and there is
  /// one value per channel in all, writes `report`, whose headers are of all ranks and layers, and gives every layer's packet a
  /// fault.
  static void agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                             cudaStream_t stream);
};

} // namespace syncnorm::cuda
