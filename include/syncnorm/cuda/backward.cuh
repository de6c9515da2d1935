#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/launch_backward.cuh>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The backward pass as kernels on a stream; see forward.cuh.
namespace syncnorm::cuda {

/// Writes the packet of this rank: `header`, and of each channel
///
///     sum_dy = Σ dv,  sum_dy_xmu = Σ dv·(x − mean),  dv = dy·f′(gamma·(x − mean)·inv_std + beta + residual)
///
/// where dv is 0 where the mask makes the output 0. If the forward pass failed, saved.count = −1, the packet gets a fault.
/// dy, x and the residual `[N, C, S]`, the mask `[N, S]`.
template <class T, class Architectures = detail::architectures>
void backward_reduce(tensor_view<T const> dy, tensor_view<T const> x, affine_values const& affine,
                     batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                     syncnorm::detail::packet_header const& header, packet_place const& packet, workspace const& work,
                     device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"backward_reduce"};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.epilogue(epilogue, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  syncnorm::detail::require_cuda(detail::launch_backward_reduce<Architectures>(
                                     detail::device_view(dy), detail::device_view(x), affine,
                                     detail::device_epilogue(epilogue), saved, header, packet, work, limits, stream),
                                 "backward_reduce");
}

/// Adds the packets in rank order, adds inv_std·sum_dy_xmu and sum_dy of `own`, this rank's packet, to the gradients of
/// gamma and beta, and writes, of all ranks' sums and saved.count,
///
///     dresidual = dv,  dx = gamma·inv_std·(dv − m·(sum_dy/count + (x − mean)·inv_std²·sum_dy_xmu/count))
///
/// where m is 1 at positions that count and 0 elsewhere; dx = gamma·inv_std·dv where the count is 0. Without exchange,
/// `packets` is `own` alone. A default dx or dresidual is not needed; each may be dy, x or the residual, but not the other.
/// Where packets disagree or have a fault it writes `report` and nothing else.
template <class T, class Architectures = detail::architectures>
void backward_elemt(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx, tensor_view<T> dresidual,
                    affine_values const& affine, batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                    gathered_packets const& packets, packet_place const& own, affine_outputs const& gradients,
                    fault_report const& report, device_limits const& limits, cudaStream_t stream) {
  detail::require_backward_operands("backward_elemt", dy, x, dx, dresidual, epilogue, saved);
  detail::operand_check const check{"backward_elemt"};
  check.packets(packets);
  check.packet(own);
  detail::backward_statistics const statistics{packets, own, saved, affine, gradients, report};
  syncnorm::detail::require_cuda(
      detail::launch_backward_elemt<Architectures>(detail::device_view(dy), detail::device_view(x),
                                                   detail::device_view(dx), detail::device_view(dresidual),
                                                   detail::device_epilogue(epilogue), statistics, limits, stream),
      "backward_elemt");
}

/// backward_reduce and backward_elemt without exchange, of one rank alone or of a step that does not exchange; in one launch,
/// which reads dy and x once, where the channels fit on the chip. `packet` is scratch.
template <class T, class Architectures = detail::architectures>
void backward_alone(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx, tensor_view<T> dresidual,
                    affine_values const& affine, batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                    syncnorm::detail::packet_header const& header, packet_place const& packet,
                    affine_outputs const& gradients, fault_report const& report, workspace const& work,
                    device_limits const& limits, cudaStream_t stream) {
  auto const fits = [&](auto const& sums) { return detail::fits_on_chip(sums, detail::fused_threads, limits); };
  auto const dy_view = detail::device_view(dy), x_view = detail::device_view(x);
  auto const epilogue_view = detail::device_epilogue(epilogue);
  using D = detail::device_element_t<T>;
  bool const on_chip = epilogue.does_something()
                           ? fits(detail::make_backward_sums<D, true>(dy_view, x_view, affine, epilogue_view, saved))
                           : fits(detail::make_backward_sums<D, false>(dy_view, x_view, affine, epilogue_view, saved));
  if (header.fault[0] != '\0' || !on_chip) {
    backward_reduce<T, Architectures>(dy, x, affine, epilogue, saved, header, packet, work, limits, stream);
    backward_elemt<T, Architectures>(dy, x, dx, dresidual, affine, epilogue, saved, own_packet(packet), packet,
                                     gradients, report, limits, stream);
    return;
  }
  detail::require_backward_operands("backward_alone", dy, x, dx, dresidual, epilogue, saved);
  detail::operand_check{"backward_alone"}.packet(packet);
  detail::backward_statistics const statistics{own_packet(packet), packet, saved, affine, gradients, report};
  syncnorm::detail::require_cuda(detail::launch_backward_on_chip<Architectures>(
                                     dy_view, x_view, detail::device_view(dx), detail::device_view(dresidual),
                                     epilogue_view, statistics, header, packet, limits, stream),
                                 "backward_alone");
}

} // namespace syncnorm::cuda
