#pragma once

#include <cstdint>
#include <string_view>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_forward.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>

namespace syncnorm::cuda::detail {

template <class T>
[[nodiscard]] bool is_wanted(tensor_view<T> const& gradient) {
  return gradient.data != nullptr || gradient.samples != 0 || gradient.channels != 0 || gradient.spatial != 0;
}

/// `batch_norm_backward` by the kernels of `Kernels`.
template <class Kernels, class T, class P, communicator C>
void backward(C const& comm, tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx,
              tensor_view<T> dresidual, affine_parameters<P> affine, affine_gradients<P> gradients,
              batch_norm_epilogue<T> const& epilogue, batch_norm_backward_options const& options,
              batch_norm_saved const& saved, batch_norm_workspace& workspace, cudaStream_t stream) {
  static constexpr std::string_view pass = "batch_norm backward";
  auto const channels = workspace.channels();
  device_check check{workspace.device()};
  check.place(stream);
  check.require(saved.exists, [] { return "there was no forward pass"; });
  check.input(x, "x", channels);
  check.input_like(dy, "dy", x);
  if (is_wanted(dx)) check.written(dx, "dx", x);
  check.epilogue_of(epilogue, x);
  if (is_wanted(dresidual)) {
    check.require(epilogue.has_residual() || x.size() == 0,
                  [] { return "the gradient of a residual is asked for, but there is no residual"; });
    check.written(dresidual, "dresidual", x);
    check.require(dx.data != dresidual.data || x.size() == 0, [] { return "dx and dresidual are the same memory"; });
  }
  check.values(affine.gamma, "gamma", channels);
  check.values(affine.beta, "beta", channels);
  check.values(gradients.gamma, "the gradient of gamma", channels);
  check.values(gradients.beta, "the gradient of beta", channels);

  bool const alone =
      syncnorm::size(comm) == 1 || !options.exchange || (saved.exists && saved.scope != statistics_scope::all_ranks);
  if (alone)
    syncnorm::detail::throw_fault(pass, check);
  else
    require_capturable(comm, pass, workspace.agreed(), stream);
  auto const own = syncnorm::detail::make_header<T>(pass, channels, x.count(), check);
  auto const report = workspace.report();
  if (alone) {
    Kernels::template backward_alone<T>(dy, x, dx, dresidual, values_of(affine), epilogue, saved.statistics(), own,
                                        workspace.own().data(),
                                        affine_outputs{outputs_of(gradients.gamma), outputs_of(gradients.beta)}, report,
                                        workspace.work(), workspace.limits(), stream);
    return workspace.raise();
  }
  bool const wrong = check.failed();
  if (wrong) {
    x = dy = {nullptr, 0, channels > 0 ? channels : 0, 0};
    dx = dresidual = {};
    affine = {};
    gradients = {};
  }
  auto const done = wrong ? batch_norm_epilogue<T>{} : epilogue;
  auto const local = [&](syncnorm::detail::packet_header const& header) {
    Kernels::template backward_reduce<T>(dy, x, values_of(affine), done, saved.statistics(), header,
                                         workspace.own().data(), workspace.work(), workspace.limits(), stream);
  };
  auto const apply = [&](gathered_packets const& packets) {
    Kernels::template backward_elemt<T>(
        dy, x, dx, dresidual, values_of(affine), done, saved.statistics(), packets, workspace.own().data(),
        affine_outputs{outputs_of(gradients.gamma), outputs_of(gradients.beta)}, report, workspace.limits(), stream);
  };
  exchange_packets(comm, workspace, workspace.own(), workspace.all(), own, stream, local, apply);
}

} // namespace syncnorm::cuda::detail
