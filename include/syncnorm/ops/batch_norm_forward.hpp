#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_epilogues.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/pass_tensors.hpp>
#include <syncnorm/ops/detail/turned_batches.hpp>

namespace syncnorm {

/// Batch normalization over the batch of all ranks, in training:
///
///     mean = Σ x / n,  var = Σ (x − mean)² / n,  y = gamma·(x − mean)/√(var + eps) + beta,  over all ranks' N and S
///     running = (1 − momentum)·running + momentum·(mean, var·n/(n − 1))    or as `options.variance` says
///
/// By `options.normalize_by`, y may be of the unbiased variance, Σ (x − mean)² / (n − 1), instead.
/// x, y `[N, C, S]`; y may be x or the residual, and may not overlap either otherwise; N and S may differ between ranks and be zero.
/// Collective: one allgather, several for a large tensor that is exchanged in parts, or two allreduces, as `options.exchange` says; none
/// with one rank. The first pass of a workspace gathers besides, where ranks reduce, or there are over 128 channels. Every rank gets the
/// same bits of mean, inv_std and running statistics. Statistics are merged in double; where no position of any rank counts, mean and
/// inv_std are 0, so that outputs are beta and the residual, activated, unless they are masked to 0, and nothing else changes. On an error,
/// which every rank throws, but what an executor or a want of memory throws after the last exchange, running statistics are unchanged on
/// the ranks that throw it, and `saved` leaves nothing for a backward pass.
/// Throws invalid_argument_error (an argument of any rank; n = 1), mismatch_error, communicator_error.
/// An epilogue activates, adds a residual and masks; it is this rank's own, and rank by rank may differ.
/// Source: Ioffe and Szegedy, "Batch normalization", 2015.
template <class T, class P = accumulate_t<T>, communicator C>
void batch_norm_forward(host::executor_ref exec, C const& comm, std::type_identity_t<tensor_view<T const>> x,
                        tensor_view<T> y, affine_parameters<P> affine, running_statistics<P> running,
                        batch_norm_options const& options, batch_norm_saved& saved, batch_norm_workspace& workspace,
                        batch_norm_caller const& caller = {}, batch_norm_epilogue<T> const& epilogue = {}) {
  batch_norm_forward_batches<T, P>(exec, comm, std::array<tensor_view<T const>, 1>{x}, std::array{y}, affine, running,
                                   options, saved, workspace, caller, std::span{&epilogue, 1});
}

/// The same with a workspace of its own, returning what the backward pass needs.
template <class T, class P = accumulate_t<T>, communicator C>
[[nodiscard]] batch_norm_saved
batch_norm_forward(host::executor_ref exec, C const& comm, std::type_identity_t<tensor_view<T const>> x,
                   tensor_view<T> y, affine_parameters<P> affine = {}, running_statistics<P> running = {},
                   batch_norm_options const& options = {}, batch_norm_epilogue<T> const& epilogue = {}) {
  batch_norm_saved saved;
  batch_norm_workspace workspace{x.channels};
  batch_norm_forward<T, P>(exec, comm, x, y, affine, running, options, saved, workspace, {}, epilogue);
  return saved;
}

namespace detail {

/// What a forward pass by constant statistics reads and writes: K micro-batches.
template <class T, class P>
struct inference_operands {
  static constexpr std::string_view name = "batch_norm inference";

  std::span<tensor_view<T const> const> x;
  std::span<tensor_view<T> const> y;
  affine_parameters<P> affine;
  std::span<P const> mean, var;
  double eps;
  running_variance kind;
  std::span<batch_norm_epilogue<T> const> epilogues{}; ///< none, or K

  [[nodiscard]] batch_norm_epilogue<T> epilogue(std::size_t k) const {
    return epilogues.empty() ? batch_norm_epilogue<T>{} : epilogues[k];
  }
};

/// Says in `check` what is wrong with them.
template <class T, class P>
void check_inference(call_check& check, inference_operands<T, P> const& in) {
  auto const channels = static_cast<std::int64_t>(in.mean.size());
  auto const batches = in.x.size();
  check_forward_tensors<T>(check, in.x, in.y, channels);
  pass_epilogues<T>::validate(check, in.epilogues, in.x);
  check_output_apart<T>(check, batches, {"y", in.y}, {{"x", in.x}, named_views<T>{in.epilogues}}, true);
  check.channel_values(in.affine.gamma, "gamma", channels);
  check.channel_values(in.affine.beta, "beta", channels);
  check.require(in.var.size() == in.mean.size(),
                [&] { return check.text("var has ", in.var.size(), " elements, mean has ", in.mean.size()); });
  check.eps(in.eps);
}

/// The pass, of valid operands.
template <class T, class P>
void infer(host::executor_ref exec, inference_operands<T, P> in, batch_norm_saved& saved) {
  turned_batches<tensor_view<T const>, tensor_view<T>, batch_norm_epilogue<T>> turned;
  turned.turn(in.x, in.x, in.y, in.epilogues);
  ++saved.passes;
  saved.scope = statistics_scope::constant;
  saved.own_count = -1;
  saved.count = 0;
  saved.mean.resize(in.mean.size());
  saved.inv_std.resize(in.var.size());
  std::ranges::transform(in.mean, saved.mean.begin(), as_double<P>);
  std::ranges::transform(in.var, saved.inv_std.begin(), as_double<P>);
  for (double& value : saved.inv_std) value = inverse_deviation(value, in.kind, in.eps);
  for (std::size_t k = 0; k < in.x.size(); ++k)
    host::normalize(exec, in.x[k], in.y[k], std::span<double const>{saved.mean}, std::span<double const>{saved.inv_std},
                    in.affine, in.epilogue(k));
}

} // namespace detail

/// `batch_norm_inference` of K micro-batches, K may be zero. Epilogues: none, or one for each.
template <class T, class P>
void batch_norm_inference_batches(host::executor_ref exec, std::span<tensor_view<T const> const> x,
                                  std::span<tensor_view<T> const> y, affine_parameters<P> affine,
                                  std::type_identity_t<std::span<P const>> mean,
                                  std::type_identity_t<std::span<P const>> var, double eps, batch_norm_saved& saved,
                                  running_variance kind = running_variance::unbiased,
                                  std::span<batch_norm_epilogue<T> const> epilogues = {}) {
  detail::or_forget(saved, statistics_scope::constant, exchange_policy::automatic, [&] {
    detail::inference_operands<T, P> const in{x, y, affine, mean, var, eps, kind, epilogues};
    detail::call_check check;
    detail::check_inference(check, in);
    detail::throw_fault(in.name, check);
    detail::infer(exec, in, saved);
  });
}

/// Batch normalization by constant statistics, y = gamma·(x − mean)/√(var + eps) + beta: inference, and training by
/// frozen statistics. Where `kind` says that var is the standard deviation, y = gamma·(x − mean)/var + beta. Not
/// collective. x, y `[N, C, S]`, y may be x; mean and var `[C]`. A mask in `epilogue` decides about outputs of 0 alone.
/// Throws invalid_argument_error.
template <class T, class P>
void batch_norm_inference(host::executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                          affine_parameters<P> affine, std::type_identity_t<std::span<P const>> mean,
                          std::type_identity_t<std::span<P const>> var, double eps, batch_norm_saved& saved,
                          running_variance kind = running_variance::unbiased,
                          batch_norm_epilogue<T> const& epilogue = {}) {
  batch_norm_inference_batches<T, P>(exec, {&x, 1}, {&y, 1}, affine, mean, var, eps, saved, kind, {&epilogue, 1});
}

} // namespace syncnorm
