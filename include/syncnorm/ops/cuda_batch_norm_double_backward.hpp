#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>

namespace syncnorm::cuda::detail {

/// `batch_norm_double_backward` by the kernels of `Kernels`.
template <class Kernels, class T, class P, communicator C>
void double_backward(C const& comm, batch_norm_second_order<T, P> const& second, tensor_view<T const> dy,
                     tensor_view<T const> x, tensor_view<T> to_dy, tensor_view<T> to_x, affine_parameters<P> affine,
                     std::span<P> gamma_gradient, batch_norm_epilogue<T> const& epilogue,
                     batch_norm_backward_options const& options, batch_norm_saved const& saved,
                     batch_norm_workspace& workspace, cudaStream_t stream) {
  static constexpr std::string_view pass = "batch_norm 2nd backward";
  auto const channels = workspace.channels();
  device_check check{workspace.device()};
  check.place(stream);
  check.require(saved.exists, [] { return "there was no forward pass"; });
  check.input(x, "x", channels);
  check.input_like(dy, "dy", x);
  if (is_wanted(second.dx)) check.input_like(second.dx, "the gradient with respect to dx", x);
  if (is_wanted(second.dresidual)) {
    check.input_like(second.dresidual, "the gradient with respect to dresidual", x);
    check.require(epilogue.has_residual() || x.size() == 0,
                  [] { return "there is a gradient with respect to dresidual, but no residual"; });
  }
  if (is_wanted(to_dy)) check.written(to_dy, "the gradient to dy", x);
  if (is_wanted(to_x)) check.written(to_x, "the gradient to x", x);
  auto const is_output = [&](T const* in) { return in != nullptr && (in == to_dy.data || in == to_x.data); };
  check.require(x.size() == 0 || !(is_output(dy.data) || is_output(x.data) || is_output(second.dx.data) ||
                                   is_output(second.dresidual.data)),
                [] { return "a gradient goes to the memory of an input"; });
  check.require(x.size() == 0 || !is_wanted(to_dy) || to_dy.data != to_x.data,
                [] { return "the gradients to dy and x are the same memory"; });
  check.epilogue_of(epilogue, x);
  check.values(affine.gamma, "gamma", channels);
  check.values(affine.beta, "beta", channels);
  check.values(second.gamma_gradient, "the gradient with respect to that of gamma", channels);
  check.values(second.beta_gradient, "the gradient with respect to that of beta", channels);
  check.values(gamma_gradient, "the gradient of gamma", channels);

  bool const alone =
      syncnorm::size(comm) == 1 || !options.exchange || (saved.exists && saved.scope != statistics_scope::all_ranks);
  if (alone)
    syncnorm::detail::throw_fault(pass, check);
  else
    require_capturable(comm, pass, workspace.agreed(), stream);
  device_scope const there{workspace.device()};
  if (workspace.double_own().empty()) {
    if (is_capturing(stream))
      throw invalid_argument_error{std::string{pass} +
                                   ": the stream is being captured in a graph before there is memory "
                                   "for it: call reserve_double_backward() first"};
    workspace.reserve_double_backward();
  }
  auto const own = syncnorm::detail::make_header<T>(pass, channels, x.count(), check);

  bool const wrong = check.failed();
  if (wrong) {
    x = dy = {nullptr, 0, channels > 0 ? channels : 0, 0};
    to_dy = to_x = {};
    affine = {};
    gamma_gradient = {};
  }
  auto const done = wrong ? batch_norm_epilogue<T>{} : epilogue;
  auto const in = wrong ? second_order<T>{}
                        : second_order<T>{second.dx, values_of(second.gamma_gradient), values_of(second.beta_gradient),
                                          second.dresidual};
  auto const from = workspace.double_own(), to = workspace.double_all();
  auto const report = workspace.report();
  auto const local = [&](syncnorm::detail::packet_header const& header) {
    Kernels::template double_backward_reduce<T>(in, dy, x, values_of(affine), done, saved.statistics(), header,
                                                from.data(), workspace.work(), workspace.limits(), stream);
  };
  auto const apply = [&](gathered_packets const& packets) {
    Kernels::template double_backward_elemt<T>(in, dy, x, to_dy, to_x, values_of(affine), done, saved.statistics(),
                                               packets, from.data(), outputs_of(gamma_gradient), report,
                                               workspace.limits(), stream);
  };
  if (!alone && !workspace.agreed()) workspace.agree(comm, own, stream);
  local(own);
  if (!alone) syncnorm::allgather(comm, std::span<std::byte const>{from}, to, stream);
  apply(alone ? gathered_packets{from.data(), 1} : gathered_packets{to.data(), syncnorm::size(comm)});
  workspace.raise();
}

} // namespace syncnorm::cuda::detail
