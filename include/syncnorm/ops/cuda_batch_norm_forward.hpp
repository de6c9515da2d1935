#pragma once

#include <algorithm>
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

namespace syncnorm::cuda {

namespace detail {

template <class P>
[[nodiscard]] channel_values values_of(std::span<P const> values) {
  return values.empty() ? channel_values{} : channel_values{values.data()};
}
template <class P>
[[nodiscard]] channel_outputs outputs_of(std::span<P> values) {
  return values.empty() ? channel_outputs{} : channel_outputs{values.data()};
}
template <class P>
[[nodiscard]] affine_values values_of(affine_parameters<P> const& affine) {
  return {values_of(affine.gamma), values_of(affine.beta)};
}

/// What no rank can let the others know of by an exchange: that there can be none on this stream.
template <communicator C>
void require_capturable(C const& comm, std::string_view pass, bool agreed, cudaStream_t stream) {
  if (!is_capturing(stream)) return;
  if constexpr (requires { comm.capturable(); })
    if (!comm.capturable())
      throw invalid_argument_error{std::string{pass} + ": the stream is being captured in a graph, and the exchange of "
                                                       "this communicator cannot be"};
  if (!agreed)
    throw invalid_argument_error{std::string{pass} + ": the stream is being captured in a graph before the ranks have "
                                                     "agreed: call prepare(stream) on every rank first"};
}

/// Exchanges the packets `from` of a pass into `to`, in which the ranks agree beforehand if they have not yet: local(header), an
/// allgather, then apply(packets). Of a header with a fault, `local` writes the header alone.
template <communicator C, class Local, class Apply>
void exchange_packets(C const& comm, batch_norm_workspace& workspace, std::span<std::byte const> from,
                      std::span<std::byte> to, syncnorm::detail::packet_header const& own, cudaStream_t stream,
                      Local const& local, Apply const& apply) {
  if (!workspace.agreed()) workspace.agree(comm, own, stream);
  local(own);
  syncnorm::allgather(comm, from, to, stream);
  apply(gathered_packets{to.data(), syncnorm::size(comm)});
  workspace.raise();
}

/// What a forward pass says of itself.
template <class T, class P>
[[nodiscard]] syncnorm::detail::packet_header
forward_header(std::int64_t channels, std::int64_t count, affine_parameters<P> const& affine,
               running_statistics<P> const& running, batch_norm_options const& options,
               syncnorm::detail::call_check const& check) {
  auto own = syncnorm::detail::make_header<T>("batch_norm forward", channels, count, check);
  own.eps = options.eps;
  own.momentum = options.momentum.value_or(-1);
  own.running_variance = static_cast<std::int32_t>(options.variance);
  own.tracks_running_statistics = running.mean.empty() ? 0 : 1;
  own.affine = (affine.gamma.empty() ? 0 : 1) + (affine.beta.empty() ? 0 : 2);
  return own;
}

/// `batch_norm_forward` by the kernels of `Kernels`; `scope` is all_ranks or this_rank, which exchanges nothing.
template <class Kernels, class T, class P, communicator C>
void forward(C const& comm, tensor_view<T const> x, tensor_view<T> y, affine_parameters<P> affine,
             running_statistics<P> running, batch_norm_options const& options, batch_norm_epilogue<T> const& epilogue,
             statistics_scope scope, batch_norm_saved& saved, batch_norm_workspace& workspace, cudaStream_t stream) {
  static constexpr std::string_view pass = "batch_norm forward";
  auto const channels = workspace.channels();
  device_check check{workspace.device()};
  check.require(channels >= 0, [&] { return check.text("the number of channels is negative: ", channels); });
  check.place(stream);
  check.input(x, "x", channels);
  check.written(y, "y", x);
  check.values(affine.gamma, "gamma", channels);
  check.values(affine.beta, "beta", channels);
  check.options(options, running, channels);
  check.require(options.exchange != exchange_policy::reduce,
                [] { return "the exchange policy is reduce, but on a device ranks only gather"; });
  check.values(running.mean, "running_mean", channels);
  check.values(running.var, "running_var", channels);
  if (running.num_batches_tracked != nullptr) check.memory(running.num_batches_tracked, "num_batches_tracked");
  check.epilogue_of(epilogue, x);

  bool const alone = syncnorm::size(comm) == 1 || scope == statistics_scope::this_rank;
  if (alone) {
    check.require(x.count() != 1 || epilogue.mask,
                  [] { return "training needs more than 1 value per channel over all ranks, got 1"; });
    syncnorm::detail::throw_fault(pass, check);
  } else {
    require_capturable(comm, pass, workspace.agreed(), stream);
  }
  auto const own = forward_header<T>(channels, x.count(), affine, running, options, check);
  running_outputs const outputs{outputs_of(running.mean), outputs_of(running.var), running.num_batches_tracked};
  auto const report = workspace.report();
  saved.scope = scope;
  saved.exists = true;
  if (alone) {
    Kernels::template forward_alone<T>(x, y, values_of(affine), epilogue, options, own, workspace.own().data(),
                                       saved.statistics(), outputs, report, workspace.work(), workspace.limits(),
                                       stream);
    return workspace.raise();
  }
  // Kernels get nothing of a call that is wrong.
  bool const wrong = check.failed();
  if (wrong) x = {nullptr, 0, std::max<std::int64_t>(channels, 0), 0}, y = {nullptr, 0, x.channels, 0}, affine = {};
  auto const done = wrong ? batch_norm_epilogue<T>{} : epilogue;
  exchange_packets(
      comm, workspace, workspace.own(), workspace.all(), own, stream,
      [&](auto const& header) {
        Kernels::template local_moments<T>(x, done.mask, header, workspace.own().data(), workspace.work(),
                                           workspace.limits(), stream);
      },
      [&](gathered_packets const& packets) {
        Kernels::template normalize<T>(x, y, values_of(affine), done, options, packets, saved.statistics(),
                                       wrong ? running_outputs{} : outputs, report, workspace.work(),
                                       workspace.limits(), stream);
      });
}

/// `batch_norm_inference` by the kernels of `Kernels`.
template <class Kernels, class T, class P>
void inference(tensor_view<T const> x, tensor_view<T> y, affine_parameters<P> affine, std::span<P const> mean,
               std::span<P const> var, batch_norm_options const& options, batch_norm_epilogue<T> const& epilogue,
               batch_norm_saved& saved, batch_norm_workspace const& workspace, cudaStream_t stream) {
  auto const channels = workspace.channels();
  device_check check{workspace.device()};
  check.place(stream);
  check.input(x, "x", channels);
  check.written(y, "y", x);
  check.values(affine.gamma, "gamma", channels);
  check.values(affine.beta, "beta", channels);
  check.values(mean, "mean", channels);
  check.values(var, "var", channels);
  check.eps(options.eps);
  check.epilogue_of(epilogue, x);
  syncnorm::detail::throw_fault("batch_norm inference", check);
  saved.scope = statistics_scope::constant;
  saved.exists = true;
  Kernels::template normalize_constant<T>(x, y, values_of(affine), epilogue, options, values_of(mean), values_of(var),
                                          saved.statistics(), workspace.limits(), stream);
}

} // namespace detail

} // namespace syncnorm::cuda
