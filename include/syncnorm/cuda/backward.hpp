#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/forward_op.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/forward.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The members of kernels_of for backward passes.
namespace syncnorm::cuda {

namespace detail {

template <class Kernels, class T>
void launch_gradient(char const* call, tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx,
                     tensor_view<T> dresidual, batch_norm_epilogue<T> const& epilogue,
                     backward_statistics const& statistics, device_limits const& limits, cudaStream_t stream,
                     bool early = false) {
  with_kind(epilogue, [&](auto kind) {
    auto const op =
        make_gradient<device_element_t<T>, kind()>(device_view(dy), device_view(x), device_view(dx),
                                                   device_view(dresidual), device_epilogue(epilogue), statistics);
    launch_map<Kernels>(call, op, limits, stream, early);
  });
}

} // namespace detail

template <class T, class Kernels>
void kernels_of<T, Kernels>::backward_reduce(in dy, in x, affine_values const& affine, epilogue const& done,
                                             saved_statistics const& saved, header const& own,
                                             packet_place const& packet, workspace const& work,
                                             device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_reduce";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.epilogue(done, x);
  check.saved(saved, x.channels);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::with_kind(done, [&](auto kind) {
    auto const op = detail::make_backward_sums<detail::device_element_t<T>, kind()>(
        detail::device_view(dy), detail::device_view(x), affine, detail::device_epilogue(done), saved);
    detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
  });
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::backward_elemt(in dy, in x, out dx, out dresidual, affine_values const& affine,
                                            epilogue const& done, saved_statistics const& saved,
                                            gathered_packets const& packets, packet_place const& own,
                                            affine_outputs const& gradients, fault_report const& report,
                                            device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_elemt";
  detail::require_backward_operands(call, dy, x, dx, dresidual, done, saved);
  detail::operand_check const check{call};
  check.packets(packets);
  check.packet(own);
  detail::launch_gradient<Kernels>(call, dy, x, dx, dresidual, done, {packets, own, saved, affine, gradients, report},
                                   limits, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::backward_alone(in dy, in x, out dx, out dresidual, affine_values const& affine,
                                            epilogue const& done, saved_statistics const& saved, header const& own,
                                            packet_place const& packet, affine_outputs const& gradients,
                                            fault_report const& report, workspace const& work,
                                            device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_alone";
  detail::require_backward_operands(call, dy, x, dx, dresidual, done, saved);
  detail::operand_check{call}.packet(packet);
  detail::backward_statistics const statistics{own_packet(packet), packet, saved, affine, gradients, report};
  bool const launched = detail::with_kind(done, [&](auto kind) {
    if constexpr (kind() != detail::epilogue_kind::exponential) { // as forward_alone
      using D = detail::device_element_t<T>;
      using map_type = detail::gradient_op<D, kind()>;
      auto const dy_view = detail::device_view(dy), x_view = detail::device_view(x);
      auto const epilogue_view = detail::device_epilogue(done);
      auto const sums = detail::make_backward_sums<D, kind()>(dy_view, x_view, affine, epilogue_view, saved);
      if (!detail::is_one_launch<Kernels, map_type>(sums, own, limits)) return false;
      auto const op = detail::make_gradient<D, kind()>(dy_view, x_view, detail::device_view(dx),
                                                       detail::device_view(dresidual), epilogue_view, statistics);
      detail::launch_fused<Kernels>(call, sums, op, own, packet, limits, stream);
      return true;
    } else {
      return false;
    }
  });
  if (launched) return;
  backward_reduce(dy, x, affine, done, saved, own, packet, work, limits, stream);
  detail::launch_gradient<Kernels>(call, dy, x, dx, dresidual, done, statistics, limits, stream, true);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::backward_constant(in dy, in x, out dx, out dresidual, affine_values const& affine,
                                               epilogue const& done, saved_statistics const& saved,
                                               device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "backward_constant";
  detail::require_backward_operands(call, dy, x, dx, dresidual, done, saved);
  if (done.does_something())
    return detail::launch_gradient<Kernels>(call, dy, x, dx, dresidual, done, {{}, {}, saved, affine}, limits, stream);
  if (dx.data == nullptr) return;
  detail::forward_statistics statistics;
  statistics.saved = saved, statistics.affine.gamma = affine.gamma, statistics.of = detail::map_of::dy;
  detail::launch_normalize<Kernels>(call, dy, dx, {}, statistics, limits, stream);
}

} // namespace syncnorm::cuda
