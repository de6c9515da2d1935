#pragma once

#include <complex>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/agreement.hpp>
#include <syncnorm/cuda/complex_kernels.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/complex_backward_op.hpp>
#include <syncnorm/cuda/detail/complex_double_backward_op.hpp>
#include <syncnorm/cuda/detail/complex_element.hpp>
#include <syncnorm/cuda/detail/complex_forward_op.hpp>
#include <syncnorm/cuda/detail/complex_reduce_ops.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/forward.hpp>
#include <syncnorm/cuda/load.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The members of complex_kernels_of.
namespace syncnorm::cuda {

namespace detail {

/// The mask of the outputs that are not 0.
[[nodiscard]] inline mask_view written_mask(batch_norm_mask const& of) {
  return of.masked == masked_outputs::zero ? of.mask : mask_view{};
}

template <class Kernels, class T>
void launch_complex_normalize(char const* call, tensor_view<std::complex<T> const> x, tensor_view<std::complex<T>> y,
                              complex_affine_values const& affine, batch_norm_mask const& mask,
                              forward_statistics const& statistics, device_limits const& limits, cudaStream_t stream) {
  complex_normalize_op<T> op;
  op.x = complex_view(x), op.y = complex_view(y);
  op.mask = written_mask(mask);
  op.turns = affine.turns();
  op.use = use_of(x);
  set_statistics(op, complex_forward_statistics{statistics, affine});
  launch_map<Kernels>(call, op, limits, stream);
}

} // namespace detail

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::load_kernels() {
  using namespace detail;
  load<Kernels, accept_entry, group_entry>();
  load_two_launches<Kernels, complex_moments_op<T>, complex_normalize_op<T>>();
  load_two_launches<Kernels, complex_backward_sums_op<T>, complex_gradient_op<T>>();
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::load_double_backward_kernels() {
  using namespace detail;
  load_two_launches<Kernels, complex_double_backward_sums_op<T>, complex_double_gradient_op<T>>();
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::local_moments(in x, mask_view mask, header const& own, packet_place const& packet,
                                                   workspace const& work, device_limits const& limits,
                                                   cudaStream_t stream) {
  auto const* const call = "local_moments";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.mask(mask, x);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::complex_moments_op<T> const op{detail::complex_view(x), mask};
  detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::normalize(in x, out y, complex_affine_values const& affine,
                                               batch_norm_mask const& mask, batch_norm_options const& options,
                                               gathered_packets const& packets, saved_statistics const& saved,
                                               running_outputs const& running, fault_report const& report,
                                               workspace const& work, device_limits const& limits,
                                               cudaStream_t stream) {
  auto const* const call = "normalize";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.mask(mask.mask, x);
  check.packets(packets);
  check.saved(saved, x.channels);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::workspace_layout const layout{work, x.channels};
  detail::launch_complex_normalize<Kernels, T>(
      call, x, y, affine, mask,
      detail::make_statistics({}, options, packets, saved, running, report, layout.pass_ticket), limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::normalize_constant(in x, out y, complex_affine_values const& affine,
                                                        batch_norm_mask const& mask, batch_norm_options const& options,
                                                        channel_values const& running_mean,
                                                        channel_values const& running_var,
                                                        saved_statistics const& saved, device_limits const& limits,
                                                        cudaStream_t stream) {
  auto const* const call = "normalize_constant";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.mask(mask.mask, x);
  check.saved(saved, x.channels);
  auto const running = detail::read_running(check, running_mean, running_var, x.channels);
  detail::launch_complex_normalize<Kernels, T>(
      call, x, y, affine, mask, detail::make_statistics({}, options, {}, saved, running, {}, nullptr), limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::backward_reduce(in dy, in x, bool turns, batch_norm_mask const& mask,
                                                     saved_statistics const& saved, header const& own,
                                                     packet_place const& packet, workspace const& work,
                                                     device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_reduce";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.mask(mask.mask, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::complex_backward_sums_op<T> op;
  op.dy = detail::complex_view(dy), op.x = detail::complex_view(x);
  op.mask = detail::written_mask(mask);
  op.saved = saved;
  op.turns = turns;
  detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::backward_elemt(in dy, in x, out dx, complex_affine_values const& affine,
                                                    batch_norm_mask const& mask, saved_statistics const& saved,
                                                    gathered_packets const& packets, packet_place const& own,
                                                    complex_affine_outputs const& gradients, fault_report const& report,
                                                    device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_elemt";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(dx, "dx", x);
  check.mask(mask.mask, x);
  check.saved(saved, x.channels);
  if (packets.data != nullptr) {
    check.packets(packets);
    check.packet(own);
  }
  detail::complex_gradient_op<T> op;
  op.dy = detail::complex_view(dy), op.x = detail::complex_view(x), op.dx = detail::complex_view(dx);
  op.mask = mask.mask;
  op.zeroes = mask.masked == masked_outputs::zero;
  op.turns = affine.turns();
  op.use = detail::use_of(x);
  detail::set_statistics(op, detail::complex_backward_statistics{packets, own, saved, affine, gradients, report});
  detail::launch_map<Kernels>(call, op, limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::double_backward_reduce(complex_second_order_values<T> const& second, in dy, in x,
                                                            bool turns, batch_norm_mask const& mask,
                                                            saved_statistics const& saved, header const& own,
                                                            packet_place const& packet, workspace const& work,
                                                            device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "double_backward_reduce";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.mask(mask.mask, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::complex_double_backward_sums_op<T> op;
  op.u = detail::complex_view(second.dx), op.dy = detail::complex_view(dy), op.x = detail::complex_view(x);
  op.mask = mask.mask;
  op.zeroes = mask.masked == masked_outputs::zero;
  op.turns = turns;
  op.saved = saved;
  op.gamma_gradient = second.gamma_gradient, op.gamma_imag_gradient = second.gamma_imag_gradient;
  detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::double_backward_elemt(complex_second_order_values<T> const& second, in dy, in x,
                                                           out to_dy, out to_x, complex_affine_values const& affine,
                                                           batch_norm_mask const& mask, saved_statistics const& saved,
                                                           gathered_packets const& packets, packet_place const& own,
                                                           complex_affine_outputs const& gradients,
                                                           fault_report const& report, device_limits const& limits,
                                                           cudaStream_t stream) {
  auto const* const call = "double_backward_elemt";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(second.dx, "the gradient with respect to dx", x);
  check.optional(to_dy, "the gradient to dy", x);
  check.optional(to_x, "the gradient to x", x);
  check.apart(to_dy, to_x, "the gradients to dy and x are the same memory");
  check.mask(mask.mask, x);
  check.saved(saved, x.channels);
  check.packets(packets);
  check.packet(own);
  detail::complex_double_gradient_op<T> op;
  op.u = detail::complex_view(second.dx), op.dy = detail::complex_view(dy), op.x = detail::complex_view(x);
  op.to_dy = detail::complex_view(to_dy), op.to_x = detail::complex_view(to_x);
  op.mask = mask.mask;
  op.zeroes = mask.masked == masked_outputs::zero;
  op.turns = affine.turns();
  op.use = detail::use_of(x);
  detail::set_statistics(op, detail::complex_double_backward_statistics{
                                 packets, own, saved, affine, second.gamma_gradient, second.gamma_imag_gradient,
                                 second.beta_gradient, gradients, report});
  detail::launch_map<Kernels>(call, op, limits, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::accept_sums(reduced_packets const& of, fault_report const& report,
                                                 cudaStream_t stream) {
  detail::launch_accept_sums<Kernels>(of, report, stream);
}

template <complex_component T, class Kernels>
void complex_kernels_of<T, Kernels>::agree_on_group(gathered_headers const& headers, bool forward,
                                                    fault_report const& report, cudaStream_t stream) {
  detail::launch_agree_on_group<Kernels>(headers, forward, report, stream);
}

} // namespace syncnorm::cuda
