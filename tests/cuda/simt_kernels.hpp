#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/accept_kernel.hpp>
#include <syncnorm/cuda/detail/group_kernel.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/operands.hpp>

#include "cuda/fake_runtime.hpp"
#include "simt/machine.hpp"

namespace test {

namespace gpu = syncnorm::cuda;

/// The launchers of cuda/ on the interpreter of tests/simt, in the order of a stream of `fake_cuda`: the kernels' own source,
/// over all memory that the stand-in for the CUDA runtime has allocated.
struct simt_kernels {
  static constexpr int threads = 64;

  template <class T>
  static void load_kernels() {
    (void)fake_cuda::enter("load_kernels");
  }

  template <class T>
  static void load_double_backward_kernels() {
    (void)fake_cuda::enter("load_double_backward_kernels");
  }

  template <class T>
  static void local_moments(syncnorm::tensor_view<T const> x, syncnorm::mask_view mask,
                            syncnorm::detail::packet_header const& header, gpu::packet_place const& packet,
                            gpu::workspace const& work, gpu::device_limits const& limits, cudaStream_t stream) {
    reduce(gpu::detail::make_reduction(gpu::detail::moments_op<T>{x, mask}, header, packet, work, limits, threads),
           stream);
  }

  template <class T>
  static void normalize(syncnorm::tensor_view<T const> x, syncnorm::tensor_view<T> y, gpu::affine_values const& affine,
                        syncnorm::batch_norm_epilogue<T> const& epilogue, syncnorm::batch_norm_options const& options,
                        gpu::gathered_packets const& packets, gpu::saved_statistics const& saved,
                        gpu::running_outputs const& running, gpu::fault_report const& report,
                        gpu::workspace const& work, gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::detail::workspace_layout const layout{work, x.channels};
    map_normalize(x, y, epilogue,
                  gpu::detail::make_statistics(affine, options, packets, saved, running, report, layout.pass_ticket),
                  limits, stream);
  }

  template <class T>
  static void normalize_constant(syncnorm::tensor_view<T const> x, syncnorm::tensor_view<T> y,
                                 gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                                 syncnorm::batch_norm_options const& options, gpu::channel_values const& mean,
                                 gpu::channel_values const& var, gpu::saved_statistics const& saved,
                                 std::int64_t const* kept_state, gpu::fault_report const& report,
                                 gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::running_outputs running;
    running.mean.data = const_cast<void*>(mean.data), running.mean.kind = mean.kind;
    running.var.data = const_cast<void*>(var.data), running.var.kind = var.kind;
    map_normalize(x, y, epilogue,
                  gpu::detail::make_statistics(affine, options, {}, saved, running, report, nullptr, kept_state),
                  limits, stream);
  }

  template <class T>
  static void forward_alone(syncnorm::tensor_view<T const> x, syncnorm::tensor_view<T> y,
                            gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                            syncnorm::batch_norm_options const& options, syncnorm::detail::packet_header const& header,
                            gpu::packet_place const& packet, gpu::saved_statistics const& saved,
                            gpu::running_outputs const& running, gpu::fault_report const& report,
                            gpu::workspace const& work, gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::detail::moments_op<T> const sums{x, epilogue.mask};
    if (!gpu::detail::fits_on_chip(sums, threads, limits)) {
      local_moments<T>(x, epilogue.mask, header, packet, work, limits, stream);
      normalize<T>(x, y, affine, epilogue, options, own_packet(packet), saved, running, report, work, limits, stream);
      return;
    }
    gpu::detail::workspace_layout const layout{work, x.channels};
    auto const statistics = gpu::detail::make_statistics(affine, options, own_packet(packet), saved, running, report,
                                                         layout.pass_ticket, packet.kept_state);
    if (epilogue.does_something())
      fused(sums, gpu::detail::make_normalize<T, true>(x, y, epilogue, statistics), header, packet, stream);
    else
      fused(sums, gpu::detail::make_normalize<T, false>(x, y, epilogue, statistics), header, packet, stream);
  }

  template <class T>
  static void backward_reduce(syncnorm::tensor_view<T const> dy, syncnorm::tensor_view<T const> x,
                              gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                              gpu::saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                              gpu::packet_place const& packet, gpu::workspace const& work,
                              gpu::device_limits const& limits, cudaStream_t stream) {
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      reduce(gpu::detail::make_reduction(gpu::detail::make_backward_sums<T, Epilogue>(dy, x, affine, epilogue, saved),
                                         header, packet, work, limits, threads),
             stream);
    };
    epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{});
  }

  template <class T>
  static void backward_elemt(syncnorm::tensor_view<T const> dy, syncnorm::tensor_view<T const> x,
                             syncnorm::tensor_view<T> dx, syncnorm::tensor_view<T> dresidual,
                             gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                             gpu::saved_statistics const& saved, gpu::gathered_packets const& packets,
                             gpu::packet_place const& own, gpu::affine_outputs const& gradients,
                             gpu::fault_report const& report, gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::detail::backward_statistics const statistics{packets, own, saved, affine, gradients, report};
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      map(gpu::detail::make_map(gpu::detail::make_gradient<T, Epilogue>(dy, x, dx, dresidual, epilogue, statistics),
                                limits, threads),
          stream);
    };
    epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{});
  }

  template <class T>
  static void backward_alone(syncnorm::tensor_view<T const> dy, syncnorm::tensor_view<T const> x,
                             syncnorm::tensor_view<T> dx, syncnorm::tensor_view<T> dresidual,
                             gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                             gpu::saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                             gpu::packet_place const& packet, gpu::affine_outputs const& gradients,
                             gpu::fault_report const& report, gpu::workspace const& work,
                             gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::detail::backward_statistics const statistics{own_packet(packet), packet, saved, affine, gradients, report};
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      auto const sums = gpu::detail::make_backward_sums<T, Epilogue>(dy, x, affine, epilogue, saved);
      if (!gpu::detail::fits_on_chip(sums, threads, limits)) return false;
      fused(sums, gpu::detail::make_gradient<T, Epilogue>(dy, x, dx, dresidual, epilogue, statistics), header, packet,
            stream);
      return true;
    };
    if (epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{})) return;
    backward_reduce<T>(dy, x, affine, epilogue, saved, header, packet, work, limits, stream);
    backward_elemt<T>(dy, x, dx, dresidual, affine, epilogue, saved, own_packet(packet), packet, gradients, report,
                      limits, stream);
  }

  template <class T>
  static void double_backward_reduce(gpu::second_order<T> const& second, syncnorm::tensor_view<T const> dy,
                                     syncnorm::tensor_view<T const> x, gpu::affine_values const& affine,
                                     syncnorm::batch_norm_epilogue<T> const& epilogue,
                                     gpu::saved_statistics const& saved, syncnorm::detail::packet_header const& header,
                                     gpu::packet_place const& packet, gpu::workspace const& work,
                                     gpu::device_limits const& limits, cudaStream_t stream) {
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      reduce(gpu::detail::make_reduction(gpu::detail::make_double_backward_sums<T, Epilogue>(
                                             second.dx, dy, x, affine, epilogue, saved, second.gamma_gradient),
                                         header, packet, work, limits, threads),
             stream);
    };
    epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{});
  }

  template <class T>
  static void
  double_backward_elemt(gpu::second_order<T> const& second, syncnorm::tensor_view<T const> dy,
                        syncnorm::tensor_view<T const> x, syncnorm::tensor_view<T> to_dy, syncnorm::tensor_view<T> to_x,
                        gpu::affine_values const& affine, syncnorm::batch_norm_epilogue<T> const& epilogue,
                        gpu::saved_statistics const& saved, gpu::gathered_packets const& packets,
                        gpu::packet_place const& own, gpu::channel_outputs const& gamma_gradient,
                        gpu::fault_report const& report, gpu::device_limits const& limits, cudaStream_t stream) {
    gpu::detail::double_backward_statistics const statistics{
        packets, own, saved, affine, second.gamma_gradient, second.beta_gradient, gamma_gradient, report};
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      map(gpu::detail::make_map(gpu::detail::make_double_gradient<T, Epilogue>(second.dx, second.dresidual, dy, x,
                                                                               to_dy, to_x, epilogue, statistics),
                                limits, threads),
          stream);
    };
    epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{});
  }

  static void accept_sums(gpu::reduced_packets const& of, gpu::fault_report const& report, cudaStream_t stream) {
    enqueue(gpu::detail::accept_blocks(of, threads), stream,
            [of, report](simt::machine& on, simt::launch_shape const& shape) {
              on.launch(shape, [&](auto const& hw) { gpu::detail::accept_kernel(hw, {of, report}); });
            });
  }

  static void agree_on_group(gpu::gathered_headers const& headers, bool forward, gpu::fault_report const& report,
                             cudaStream_t stream) {
    enqueue(1, stream, [headers, forward, report](simt::machine& on, simt::launch_shape const& shape) {
      on.launch(shape, [&](auto const& hw) { gpu::detail::group_kernel(hw, {headers, forward, report}); });
    });
  }

  template <class T>
  static void keep(syncnorm::tensor_view<T> x, gpu::affine_values const& affine, syncnorm::activation const& of,
                   gpu::kept_channels const& kept, gpu::device_limits const& limits, cudaStream_t stream) {
    enqueue(1, stream,
            [a = gpu::detail::make_choose<T>(x.channels, affine, of, kept)](simt::machine& on,
                                                                            simt::launch_shape const& shape) {
              on.launch(shape, [&](auto const& hw) { gpu::detail::choose_kernel<threads>(hw, a); });
            });
    copy(x, kept, nullptr, limits, stream);
  }

  template <class T>
  static void recover(syncnorm::tensor_view<T> y, syncnorm::batch_norm_epilogue<T> const& epilogue,
                      gpu::affine_values const& affine, gpu::saved_statistics const& saved,
                      gpu::kept_channels const& kept, gpu::device_limits const& limits, cudaStream_t stream) {
    auto const with = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
      map(gpu::detail::make_map(gpu::detail::make_recover<T, Epilogue>(y, epilogue, affine, saved), limits, threads),
          stream);
    };
    if (epilogue.activation.negative_slope > 0)
      epilogue.does_something() ? with(std::true_type{}) : with(std::false_type{});

    copy(y, kept, saved.count, limits, stream);
  }

private:
  template <class T>
  static void copy(syncnorm::tensor_view<T> x, gpu::kept_channels const& kept, std::int64_t const* saved_count,
                   gpu::device_limits const& limits, cudaStream_t stream) {
    if (kept.room == 0 || x.size() == 0) return;
    enqueue(gpu::detail::copy_blocks(x, kept, limits), stream,
            [a = gpu::detail::make_copy(x, kept, saved_count)](simt::machine& on, simt::launch_shape const& shape) {
              on.launch(shape, [&](auto const& hw) { gpu::detail::copy_kernel(hw, a); });
            });
  }
  template <class T>
  static void map_normalize(syncnorm::tensor_view<T const> x, syncnorm::tensor_view<T> y,
                            syncnorm::batch_norm_epilogue<T> const& epilogue,
                            gpu::detail::forward_statistics const& statistics, gpu::device_limits const& limits,
                            cudaStream_t stream) {
    if (epilogue.does_something())
      map(gpu::detail::make_map(gpu::detail::make_normalize<T, true>(x, y, epilogue, statistics), limits, threads),
          stream);
    else
      map(gpu::detail::make_map(gpu::detail::make_normalize<T, false>(x, y, epilogue, statistics), limits, threads),
          stream);
  }

  template <class Op>
  static void reduce(gpu::detail::reduce_arguments<Op> const& a, cudaStream_t stream) {
    using gpu::detail::axis;
    enqueue(a.cut.groups * a.cut.pieces, stream, [a](simt::machine& on, simt::launch_shape const& shape) {
      if (gpu::detail::axis_of(a.op.lead()) == axis::positions)
        on.launch(shape, [&](auto const& hw) { gpu::detail::reduce_kernel<Op, axis::positions, threads>(hw, a); });
      else
        on.launch(shape, [&](auto const& hw) { gpu::detail::reduce_kernel<Op, axis::channels, threads>(hw, a); });
    });
  }
  template <class Op>
  static void map(gpu::detail::map_arguments<Op> const& a, cudaStream_t stream) {
    using gpu::detail::axis;
    enqueue(a.cut.groups * a.cut.pieces, stream, [a](simt::machine& on, simt::launch_shape const& shape) {
      if (gpu::detail::axis_of(a.op.lead()) == axis::positions)
        on.launch(shape, [&](auto const& hw) { gpu::detail::map_kernel<Op, axis::positions>(hw, a); });
      else
        on.launch(shape, [&](auto const& hw) { gpu::detail::map_kernel<Op, axis::channels>(hw, a); });
    });
  }

  template <class Sums, class Map>
  static void fused(Sums const& sums, Map const& op, syncnorm::detail::packet_header const& header,
                    gpu::packet_place const& packet, cudaStream_t stream) {
    auto const a = gpu::detail::make_fused(sums, op, header, packet, threads);
    enqueue(
        a.cut.groups, stream,
        [a](simt::machine& on, simt::launch_shape const& shape) {
          on.launch(shape, [&](auto const& hw) { gpu::detail::fused_kernel<Sums, Map, threads>(hw, a); });
        },
        static_cast<std::size_t>(gpu::detail::fused_bytes<Sums>(a.cut)));
  }

  template <class Run>
  static void enqueue(std::uint32_t blocks, cudaStream_t stream, Run const& run, std::size_t dynamic_shared = 0) {
    fake_cuda::enter("kernel");
    int current = 0;
    cudaGetDevice(&current);
    syncnorm::detail::require_cuda(
        fake_cuda::device_of(stream) == current ? cudaSuccess : cudaErrorInvalidResourceHandle, "kernel");
    fake_cuda::enqueue(stream, [blocks, run, dynamic_shared] {
      thread_local simt::machine machine; // whose fibers have stacks by now
      machine.memory.clear();
      fake_cuda::for_each_allocation([&](void* data, std::size_t bytes) {
        if (bytes < 4096) // which may be a mask
          machine.memory.add("device memory", static_cast<std::uint8_t*>(data), bytes);
        else
          machine.memory.add("device memory", static_cast<std::uint16_t*>(data), bytes / 2);
      });
      try {
        run(machine, {std::max(1u, blocks), threads, dynamic_shared, 0});
      } catch (simt::violation const& what) {
        fake_cuda::note(what.what());
      }
    });
  }
};

} // namespace test
