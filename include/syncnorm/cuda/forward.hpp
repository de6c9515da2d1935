#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>

// The members of kernels_of for forward passes.
namespace syncnorm::cuda {

namespace detail {

/// Running statistics that are read alone.
[[nodiscard]] inline running_outputs read_running(operand_check const& check, channel_values const& mean,
                                                  channel_values const& var, std::int64_t channels) {
  check.require((mean.data != nullptr && var.data != nullptr) || channels == 0, "the running statistics are null");
  running_outputs running;
  running.mean.data = const_cast<void*>(mean.data), running.mean.kind = mean.kind;
  running.var.data = const_cast<void*>(var.data), running.var.kind = var.kind;
  return running;
}

template <class Kernels, class T>
void launch_normalize(char const* call, tensor_view<T const> x, tensor_view<T> y,
                      batch_norm_epilogue<T> const& epilogue, forward_statistics const& statistics,
                      device_limits const& limits, cudaStream_t stream, bool early = false) {
  with_kind(epilogue, [&](auto kind) {
    launch_map<Kernels>(call,
                        make_normalize<device_element_t<T>, kind()>(device_view(x), device_view(y),
                                                                    device_epilogue(epilogue), statistics),
                        limits, stream, early);
  });
}

} // namespace detail

template <class T, class Kernels>
void kernels_of<T, Kernels>::local_moments(in x, mask_view mask, header const& own, packet_place const& packet,
                                           workspace const& work, device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "local_moments";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.epilogue<T>({{}, {}, mask}, x);
  check.packet(packet);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::moments_op<detail::device_element_t<T>> const op{detail::device_view(x), mask};
  detail::launch_reduction<Kernels>(call, op, own, packet, work, limits, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::normalize(in x, out y, affine_values const& affine, epilogue const& done,
                                       batch_norm_options const& options, gathered_packets const& packets,
                                       saved_statistics const& saved, running_outputs const& running,
                                       fault_report const& report, workspace const& work, device_limits const& limits,
                                       cudaStream_t stream) {
  auto const* const call = "normalize";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.epilogue(done, x);
  check.packets(packets);
  check.saved(saved, x.channels);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::workspace_layout const layout{work, x.channels};
  auto const statistics = detail::make_statistics(affine, options, packets, saved, running, report, layout.pass_ticket);
  detail::launch_normalize<Kernels>(call, x, y, done, statistics, limits, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::normalize_constant(in x, out y, affine_values const& affine, epilogue const& done,
                                                batch_norm_options const& options, channel_values const& running_mean,
                                                channel_values const& running_var, saved_statistics const& saved,
                                                std::int64_t const* kept_state, fault_report const& report,
                                                device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "normalize_constant";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.epilogue(done, x);
  auto const running = detail::read_running(check, running_mean, running_var, x.channels);
  auto const statistics = detail::make_statistics(affine, options, {}, saved, running, report, nullptr, kept_state);
  detail::launch_normalize<Kernels>(call, x, y, done, statistics, limits, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::forward_alone(in x, out y, affine_values const& affine, epilogue const& done,
                                           batch_norm_options const& options, header const& own,
                                           packet_place const& packet, saved_statistics const& saved,
                                           running_outputs const& running, fault_report const& report,
                                           workspace const& work, device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "forward_alone";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.like(y, "y", x);
  check.epilogue(done, x);
  check.packet(packet);
  check.saved(saved, x.channels);
  check.work(work, workspace_bytes(x.channels, limits));
  detail::workspace_layout const layout{work, x.channels};
  auto const statistics = detail::make_statistics(affine, options, own_packet(packet), saved, running, report,
                                                  layout.pass_ticket, packet.kept_state);
  auto const launched = detail::with_kind(done, [&](auto kind) {
    // Not worth kernels of its own for an exponential.
    if constexpr (kind() != detail::epilogue_kind::exponential) {
      using D = detail::device_element_t<T>;
      using map_type = detail::normalize_op<D, kind()>;
      detail::moments_op<D> const sums{detail::device_view(x), done.mask};
      if (!detail::is_one_launch<Kernels, map_type>(sums, own, limits)) return false;
      auto const op = detail::make_normalize<D, kind()>(detail::device_view(x), detail::device_view(y),
                                                        detail::device_epilogue(done), statistics);
      detail::launch_fused<Kernels>(call, sums, op, own, packet, limits, stream);
      return true;
    } else {
      return false;
    }
  });
  if (launched) return;
  local_moments(x, done.mask, own, packet, work, limits, stream);
  detail::launch_normalize<Kernels>(call, x, y, done, statistics, limits, stream, true);
}

} // namespace syncnorm::cuda
