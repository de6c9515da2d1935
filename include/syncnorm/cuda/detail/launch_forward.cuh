#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/launch.cuh>

namespace syncnorm::cuda::detail {

template <class Architectures, class T>
cudaError_t launch_local_moments(tensor_view<T const> x, mask_view mask, packet_header const& header,
                                 packet_place const& packet, workspace const& work, device_limits const& limits,
                                 cudaStream_t stream) {
  using op = moments_op<T>;
  return launch_reduction<Architectures>(make_reduction(op{x, mask}, header, packet, work, limits, op::threads),
                                         stream);
}

template <class Architectures, class T>
cudaError_t launch_normalize(tensor_view<T const> x, tensor_view<T> y, batch_norm_epilogue<T> const& epilogue,
                             forward_statistics const& statistics, device_limits const& limits, cudaStream_t stream) {
  auto const run = [&](auto const& op) { return launch_map<Architectures>(make_map(op, limits, op.threads), stream); };
  return epilogue.does_something() ? run(make_normalize<T, true>(x, y, epilogue, statistics))
                                   : run(make_normalize<T, false>(x, y, epilogue, statistics));
}

/// In one launch; the caller has asked `fits_on_chip`.
template <class Architectures, class T>
cudaError_t launch_forward_on_chip(tensor_view<T const> x, tensor_view<T> y, batch_norm_epilogue<T> const& epilogue,
                                   forward_statistics const& statistics, packet_header const& header,
                                   packet_place const& packet, device_limits const& limits, cudaStream_t stream) {
  moments_op<T> const sums{x, epilogue.mask};
  auto const run = [&](auto const& op) {
    return launch_fused<Architectures>(make_fused(sums, op, header, packet, fused_threads), limits, stream);
  };
  return epilogue.does_something() ? run(make_normalize<T, true>(x, y, epilogue, statistics))
                                   : run(make_normalize<T, false>(x, y, epilogue, statistics));
}

} // namespace syncnorm::cuda::detail
