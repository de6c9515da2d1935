#pragma once

#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/launch.cuh>

namespace syncnorm::cuda::detail {

template <class Architectures, class T>
cudaError_t launch_backward_reduce(tensor_view<T const> dy, tensor_view<T const> x, affine_values const& affine,
                                   batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved,
                                   packet_header const& header, packet_place const& packet, workspace const& work,
                                   device_limits const& limits, cudaStream_t stream) {
  auto const run = [&](auto const& op) {
    return launch_reduction<Architectures>(make_reduction(op, header, packet, work, limits, op.threads), stream);
  };
  return epilogue.does_something() ? run(make_backward_sums<T, true>(dy, x, affine, epilogue, saved))
                                   : run(make_backward_sums<T, false>(dy, x, affine, epilogue, saved));
}

template <class Architectures, class T>
cudaError_t launch_backward_elemt(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx,
                                  tensor_view<T> dresidual, batch_norm_epilogue<T> const& epilogue,
                                  backward_statistics const& statistics, device_limits const& limits,
                                  cudaStream_t stream) {
  auto const run = [&](auto const& op) { return launch_map<Architectures>(make_map(op, limits, op.threads), stream); };
  return epilogue.does_something() ? run(make_gradient<T, true>(dy, x, dx, dresidual, epilogue, statistics))
                                   : run(make_gradient<T, false>(dy, x, dx, dresidual, epilogue, statistics));
}

/// In one launch; the caller has asked `fits_on_chip`.
template <class Architectures, class T>
cudaError_t launch_backward_on_chip(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx,
                                    tensor_view<T> dresidual, batch_norm_epilogue<T> const& epilogue,
                                    backward_statistics const& statistics, packet_header const& header,
                                    packet_place const& packet, device_limits const& limits, cudaStream_t stream) {
  auto const run = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
    auto const sums = make_backward_sums<T, Epilogue>(dy, x, statistics.affine, epilogue, statistics.saved);
    auto const op = make_gradient<T, Epilogue>(dy, x, dx, dresidual, epilogue, statistics);
    return launch_fused<Architectures>(make_fused(sums, op, header, packet, fused_threads), limits, stream);
  };
  return epilogue.does_something() ? run(std::true_type{}) : run(std::false_type{});
}

} // namespace syncnorm::cuda::detail
