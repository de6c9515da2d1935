#pragma once

#include <complex>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// The local primitives of complex numbers as kernels on a stream, as `kernels_of` has those of real ones, and compiled like them:
///
///     template struct syncnorm::cuda::complex_kernels_of<float>; // or double
///
/// C is the number of complex channels. Packets have 2·C, real and imaginary parts, `packet_bytes(2·C)`; so have the saved mean and
/// inv_std, whose components are equal, beta and the running mean, `[C, 2]`. Parameters otherwise, and the running variance, `[C]`.
template <complex_component T, class Kernels = compiled_kernels>
struct complex_kernels_of {
  using in = tensor_view<std::complex<T> const>;
  using out = tensor_view<std::complex<T>>;
  using header = syncnorm::detail::packet_header;

  /// As those of `kernels_of`.
  static void load_kernels();
  static void load_double_backward_kernels();

  /// Writes the packet of this rank: `own`, with its count, and mean and m2 of each component over the positions that count. Of a header
  /// with a fault nothing but the header is written.
  static void local_moments(in x, mask_view mask, header const& own, packet_place const& packet, workspace const& work,
                            device_limits const& limits, cudaStream_t stream);

  /// Merges the packets in rank order, writes `saved`, moves the running statistics and their counter as `options` says, and normalizes,
  ///
  ///     y = gamma·(x − mean)·inv_std + beta,  inv_std = 1/√(E|x − mean|² + eps)     or 0; `batch_norm_mask`
  ///
  /// Where a packet has a fault, packets disagree, or there is one value per channel in all, it writes `report` and saved.count = −1
  /// and nothing else. y may be x. `work` is that of local_moments.
  static void normalize(in x, out y, complex_affine_values const& affine, batch_norm_mask const& mask,
                        batch_norm_options const& options, gathered_packets const& packets,
                        saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                        workspace const& work, device_limits const& limits, cudaStream_t stream);

  /// The same by the running statistics, as in evaluation; `saved` gets a count of 0.
  static void normalize_constant(in x, out y, complex_affine_values const& affine, batch_norm_mask const& mask,
                                 batch_norm_options const& options, channel_values const& running_mean,
                                 channel_values const& running_var, saved_statistics const& saved,
                                 device_limits const& limits, cudaStream_t stream);

  /// Writes the packet of this rank: `own`, and of each channel Σ dy, and of Σ dy·conj(x − mean) the real part, or, where gamma
  /// `turns` numbers, both; of the positions whose outputs are not 0. If the forward pass failed, saved.count = −1, the packet gets a fault.
  static void backward_reduce(in dy, in x, bool turns, batch_norm_mask const& mask, saved_statistics const& saved,
                              header const& own, packet_place const& packet, workspace const& work,
                              device_limits const& limits, cudaStream_t stream);

  /// Adds the packets in rank order, adds inv_std·Σ dy·conj(x − mean) and Σ dy of `own`, this rank's packet, to the gradients of gamma
  /// and beta, and writes, of all ranks' sums and saved.count, with v = dy·conj(gamma),
  ///
  ///     dx = inv_std·(v − m·(Σ v/count + (x − mean)·inv_std²·Re Σ v·conj(x − mean)/count))
  ///
  /// with m and the counts as in `kernels_of::backward_elemt`. Without packets, by constant statistics: dx = inv_std·v, and nothing else.
  /// A default dx is not needed; it may be dy or x. Where packets disagree or have a fault it writes `report` and nothing else.
  static void backward_elemt(in dy, in x, out dx, complex_affine_values const& affine, batch_norm_mask const& mask,
                             saved_statistics const& saved, gathered_packets const& packets, packet_place const& own,
                             complex_affine_outputs const& gradients, fault_report const& report,
                             device_limits const& limits, cudaStream_t stream);

  /// Writes the packet of this rank for double backward, by the formulae of ops/complex_batch_norm_double_backward.hpp, of seven values a
  /// component, `packet_bytes(2·C, 7)`: those of `kernels_of::double_backward_reduce`.
  static void double_backward_reduce(complex_second_order_values<T> const& second, in dy, in x, bool turns,
                                     batch_norm_mask const& mask, saved_statistics const& saved, header const& own,
                                     packet_place const& packet, workspace const& work, device_limits const& limits,
                                     cudaStream_t stream);

  /// Adds the packets in rank order, adds this rank's part to the gradient of gamma, and writes to_dy and to_x, of which a default one is
  /// not needed. Neither may be an input. Where packets disagree or have a fault it writes `report` and nothing else.
  static void double_backward_elemt(complex_second_order_values<T> const& second, in dy, in x, out to_dy, out to_x,
                                    complex_affine_values const& affine, batch_norm_mask const& mask,
                                    saved_statistics const& saved, gathered_packets const& packets,
                                    packet_place const& own, complex_affine_outputs const& gradients,
                                    fault_report const& report, device_limits const& limits, cudaStream_t stream);

  /// Those of `kernels_of`.
  static void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream);
  static void agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                             cudaStream_t stream);
};

} // namespace syncnorm::cuda
