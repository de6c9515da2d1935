#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/gpu_kernels.cuh>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>
#include <syncnorm/ops/cuda_batch_norm_layer.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_complex_batch_norm_layer.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_backward.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_forward.hpp>

namespace syncnorm::cuda {

/// A batch normalization layer on a GPU; see `basic_batch_norm`.
template <mutable_element T, communicator C = self_communicator, class P = accumulate_t<T>,
          class Kernels = gpu_kernels<>>
using batch_norm = basic_batch_norm<T, C, P, Kernels>;

/// The same of complex numbers, `std::complex<T>`; see `basic_complex_batch_norm`.
template <complex_component T, communicator C = self_communicator, class Kernels = gpu_kernels<>>
using complex_batch_norm = basic_complex_batch_norm<T, C, Kernels>;

/// `syncnorm::batch_norm_forward` of device memory, enqueued on the stream.
///
/// x, y `[N, C, S]`; y may be x. One launch where a rank is alone and its channels fit on the chip, else two, and three where ranks
/// reduce; with several ranks one allgather, or, as `options.exchange` says, allreduces beside one of headers. Collective; the ranks
/// agree before the first pass of a workspace, for which it waits for the stream. A workspace is of this size:
///
///     auto const limits = current_limits();
///     batch_norm_workspace workspace{channels, ranks, limits, workspace_bytes(channels, limits)};
///
/// Throws as `basic_batch_norm`: with several ranks from a later call with the workspace, or from `workspace.raise()`.
template <class T, class P = accumulate_t<T>, allgathers_on_stream<std::byte> C>
void batch_norm_forward(C const& comm, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                        affine_parameters<P> affine, running_statistics<P> running, batch_norm_options const& options,
                        batch_norm_epilogue<T> const& epilogue, batch_norm_saved& saved,
                        batch_norm_workspace& workspace, cudaStream_t stream) {
  detail::forward<gpu_kernels<>, T, P>(comm,
                                       {{&x, 1}, {&y, 1}, affine, running, statistics_scope::all_ranks, {&epilogue, 1}},
                                       options, saved, workspace, stream);
}

/// `syncnorm::batch_norm_inference` of device memory, one launch on the stream. x, y `[N, C, S]`; y may be x. Local. Of the options
/// `eps` and `variance` count. Throws invalid_argument_error, cuda_error.
template <class T, class P = accumulate_t<T>>
void batch_norm_inference(std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y, affine_parameters<P> affine,
                          std::type_identity_t<std::span<P const>> mean, std::type_identity_t<std::span<P const>> var,
                          batch_norm_options const& options, batch_norm_epilogue<T> const& epilogue,
                          batch_norm_saved& saved, batch_norm_workspace& workspace, cudaStream_t stream) {
  auto const read = [](std::span<P const> values) {
    return std::span<P>{const_cast<P*>(values.data()), values.size()};
  };
  detail::forward<gpu_kernels<>, T, P>(
      self_communicator{},
      {{&x, 1}, {&y, 1}, affine, {read(mean), read(var)}, statistics_scope::constant, {&epilogue, 1}}, options, saved,
      workspace, stream);
}

/// `syncnorm::batch_norm_backward` of device memory, enqueued on the stream, in as many launches as
/// `batch_norm_forward` and no more collectives, and with its errors. Default `dx` and `dresidual`: not needed; dx may be dy or x,
/// and dresidual dy, x or the residual.
template <class X, class P = accumulate_t<X>, allgathers_on_stream<std::byte> C>
void batch_norm_backward(C const& comm, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dresidual,
                         affine_parameters<P> affine, affine_gradients<P> gradients,
                         batch_norm_epilogue<std::remove_const_t<X>> const& epilogue,
                         batch_norm_backward_options const& options, batch_norm_saved const& saved,
                         batch_norm_workspace& workspace, cudaStream_t stream) {
  using T = std::remove_const_t<X>;
  tensor_view<T const> const from = dy;
  detail::backward<gpu_kernels<>, T, P>(
      comm, {{&from, 1}, {&x, 1}, {&dx, 1}, affine, gradients, {&epilogue, 1}, {&dresidual, 1}}, options, saved,
      workspace, stream);
}

} // namespace syncnorm::cuda
