#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_epilogues.hpp>

namespace syncnorm {

/// Batch normalization over the batch of all ranks, in training:
///
///     mean = Σ x / n,  var = Σ (x − mean)² / n,  y = gamma·(x − mean)/√(var + eps) + beta,  over all ranks' N and S
///     running = (1 − momentum)·running + momentum·(mean, var·n/(n − 1))    or as `options.variance` says
///
/// x, y `[N, C, S]`, y may be x; N and S may differ between ranks and be zero. Collective: one allgather once the
/// workspace has been used, none with one rank. Every rank gets the same bits of mean, inv_std and running statistics.
/// Statistics are merged in double; where no rank has a sample nothing changes. On an error, which every rank throws,
/// running statistics are unchanged and `saved` is unusable.
/// Throws invalid_argument_error (an argument of any rank; n = 1), mismatch_error, communicator_error.
/// An epilogue activates, adds a residual and masks; it is this rank's own, and rank by rank may differ.
/// Source: Ioffe and Szegedy, "Batch normalization", 2015.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
void batch_norm_forward(E const& exec, C const& comm, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                        affine_parameters<P> affine, running_statistics<P> running, batch_norm_options const& options,
                        batch_norm_saved& saved, batch_norm_workspace& workspace, batch_norm_caller const& caller = {},
                        batch_norm_epilogue<T> const& epilogue = {}) {
  batch_norm_forward_batches<T, P>(exec, comm, std::array<tensor_view<T const>, 1>{x}, std::array{y}, affine, running,
                                   options, saved, workspace, caller, std::span{&epilogue, 1});
}

/// The same with a workspace of its own, returning what the backward pass needs.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
[[nodiscard]] batch_norm_saved
batch_norm_forward(E const& exec, C const& comm, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                   affine_parameters<P> affine = {}, running_statistics<P> running = {},
                   batch_norm_options const& options = {}, batch_norm_epilogue<T> const& epilogue = {}) {
  batch_norm_saved saved;
  batch_norm_workspace workspace{x.channels};
  batch_norm_forward<T, P>(exec, comm, x, y, affine, running, options, saved, workspace, {}, epilogue);
  return saved;
}

namespace detail {

/// Says in `check` what is wrong with the arguments of `batch_norm_inference`.
template <class T, class P>
void check_inference(call_check& check, tensor_view<T const> x, tensor_view<T> y, affine_parameters<P> affine,
                     std::span<P const> mean, std::span<P const> var, double eps,
                     batch_norm_epilogue<T> const& epilogue) {
  auto const channels = static_cast<std::int64_t>(mean.size());
  check.tensor(x, "x", channels);
  check.output(y, "y", x);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(affine.beta, "beta", channels);
  check.require(var.size() == mean.size(),
                [&] { return check.text("var has ", var.size(), " elements, mean has ", mean.size()); });
  check.eps(eps);
  pass_epilogues<T>::check_one(check, epilogue, x);
}

} // namespace detail

/// Batch normalization by constant statistics, y = gamma·(x − mean)/√(var + eps) + beta: inference, and training by
/// frozen statistics. Where `kind` says that var is the standard deviation, y = gamma·(x − mean)/var + beta. Not
/// collective. x, y `[N, C, S]`, y may be x; mean and var `[C]`. A mask in `epilogue` decides about outputs of 0 alone.
/// Throws invalid_argument_error.
template <class T, class P, host::executor E>
void batch_norm_inference(E const& exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                          affine_parameters<P> affine, std::type_identity_t<std::span<P const>> mean,
                          std::type_identity_t<std::span<P const>> var, double eps, batch_norm_saved& saved,
                          running_variance kind = running_variance::unbiased,
                          batch_norm_epilogue<T> const& epilogue = {}) {
  detail::call_check check;
  detail::check_inference<T, P>(check, x, y, affine, mean, var, eps, epilogue);
  detail::throw_fault("batch_norm inference", check);

  saved.scope = statistics_scope::constant;
  saved.count = 0;
  saved.mean.resize(mean.size());
  saved.inv_std.resize(var.size());
  std::ranges::transform(mean, saved.mean.begin(), as_double<P>);
  std::ranges::transform(var, saved.inv_std.begin(), as_double<P>);
  bool const is_deviation = kind == running_variance::standard_deviation;
  for (double& value : saved.inv_std) value = 1.0 / (is_deviation ? value : std::sqrt(value + eps));
  host::normalize(exec, x, y, std::span<double const>{saved.mean}, std::span<double const>{saved.inv_std}, affine,
                  epilogue);
}

} // namespace syncnorm
