#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/forward_in_blocks.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/running_statistics.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/parts.hpp>

namespace syncnorm {

namespace detail {

inline void require_trainable_count(std::int64_t count) {
  if (count == 1)
    throw invalid_argument_error{"batch_norm forward: training needs more than 1 value per channel over all ranks, "
                                 "got 1"};
}

/// Starts `saved` for `count` elements of each channel; the statistics follow channel by channel.
inline void start_saved(batch_norm_saved& saved, std::vector<double>& m2, std::int64_t channels, std::int64_t count) {
  require_trainable_count(count);
  saved.scope = statistics_scope::all_ranks;
  saved.count = count;
  saved.mean.assign(static_cast<std::size_t>(channels), 0.0);
  saved.inv_std.assign(static_cast<std::size_t>(channels), 0.0);
  m2.assign(static_cast<std::size_t>(channels), 0.0);
}

/// inv_std = 1/√(m2/count + eps); 0 where nothing was counted.
inline void finish_statistics(std::span<double const> m2, std::int64_t count, double eps, std::span<double> inv_std) {
  for (std::size_t c = 0; c < m2.size(); ++c)
    inv_std[c] = count > 0 ? 1.0 / std::sqrt(m2[c] / static_cast<double>(count) + eps) : 0.0;
}

/// Whether some rank needs a backward pass. Throws where another one cannot join it.
inline bool require_backward_agreement(std::string_view pass, std::span<packet_header const> ranks) {
  auto const first = [&](backward_pass what) {
    return std::ranges::find(ranks, static_cast<std::int64_t>(what), &packet_header::backward) - ranks.begin();
  };
  auto const needs = first(backward_pass::needed), lacks = first(backward_pass::impossible);
  if (needs == std::ssize(ranks) || lacks == std::ssize(ranks)) return needs != std::ssize(ranks);
  throw mismatch_error{call_check::text(pass, ": ranks disagree on whether a backward pass follows: rank ", needs,
                                        " needs one, rank ", lacks, " records no gradients")};
}

/// Moves the running statistics towards `saved`. `m2` is used up.
template <class P>
void update_running_statistics(running_statistics<P> running, batch_norm_options const& options,
                               batch_norm_saved const& saved, std::span<double> m2) {
  if (running.mean.empty() || saved.count == 0) return;
  double const weight =
      options.momentum ? *options.momentum : 1.0 / static_cast<double>(*running.num_batches_tracked + 1);
  auto const divisor = options.variance == running_variance::unbiased ? saved.count - 1 : saved.count;
  for (double& value : m2) value /= static_cast<double>(divisor);
  if (options.variance == running_variance::standard_deviation)
    for (double& value : m2) value = std::sqrt(value + options.eps);
  host::update_running(running.mean, std::span<double const>{saved.mean}, weight);
  host::update_running(running.var, std::span<double const>{m2}, weight);
  if (running.num_batches_tracked != nullptr) ++*running.num_batches_tracked;
}

} // namespace detail

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
/// Source: Ioffe and Szegedy, "Batch normalization", 2015.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
void batch_norm_forward(E const& exec, C const& comm, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                        affine_parameters<P> affine, running_statistics<P> running, batch_norm_options const& options,
                        batch_norm_saved& saved, batch_norm_workspace& workspace,
                        batch_norm_caller const& caller = {}) {
  static constexpr std::string_view pass = "batch_norm forward";
  auto& exchange = workspace.exchange;
  auto& m2 = workspace.first;
  std::int64_t const channels = exchange.channels();

  detail::call_check check;
  check.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
  check.require(channels >= 0, [&] { return check.text("the number of channels is negative: ", channels); });
  check.tensor(x, "x", channels);
  check.output(y, "y", x);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(affine.beta, "beta", channels);
  check.options(options, running, channels);

  auto const finish = [&](detail::channel_span part) {
    detail::finish_statistics(detail::part_of(std::span{m2}, part), saved.count, options.eps,
                              detail::part_of(std::span{saved.inv_std}, part));
  };

  if (size(comm) == 1) {
    detail::throw_fault(pass, check);
    detail::start_saved(saved, m2, channels, x.count());
    saved.backward_needed = caller.backward == backward_pass::needed;
    host::forward_in_blocks(exec, x, y, saved.mean, m2, saved.inv_std, affine,
                            [&](std::int64_t first, std::int64_t length) {
                              finish({first, length});
                            });
  } else {
    auto own = detail::make_header<T>(pass, channels, x.count(), check);
    own.eps = options.eps;
    own.momentum = options.momentum.value_or(-1);
    own.running_variance = static_cast<std::int64_t>(options.variance);
    own.tracks_running_statistics = running.mean.empty() ? 0 : 1;
    own.affine = (affine.gamma.empty() ? 0 : 1) + (affine.beta.empty() ? 0 : 2);
    own.backward = static_cast<std::int64_t>(caller.backward);
    auto const parts = check.failed() ? detail::part_choice{1, false} : detail::choose_parts(comm, x, 1);
    own.part_channels = parts.channels;
    workspace.forward_plan.ahead = parts.ahead;
    auto const stores = host::stores_for(y);
    exchange.run(
        comm, own, workspace.forward_plan,
        [&](detail::exchange_part const& part) {
          if (!check.failed()) host::local_moments(exec, detail::part_of(x, part.channels), part.first, part.second);
        },
        [&] {
          saved.backward_needed = detail::require_backward_agreement(pass, exchange.headers());
          std::int64_t count = 0;
          for (auto const& header : exchange.headers()) count += header.count;
          detail::start_saved(saved, m2, channels, count);
        },
        [&](detail::exchange_part const& part) {
          detail::merge_ranks(exchange, part, detail::part_of(std::span{saved.mean}, part.channels),
                              detail::part_of(std::span{m2}, part.channels));
          finish(part.channels);
          host::normalize(exec, detail::part_of(x, part.channels), detail::part_of(y, part.channels),
                          detail::part_of(std::span<double const>{saved.mean}, part.channels),
                          detail::part_of(std::span<double const>{saved.inv_std}, part.channels),
                          affine_parameters<P>{detail::part_of(affine.gamma, part.channels),
                                               detail::part_of(affine.beta, part.channels)},
                          stores, detail::part_after(x, 1, part.channels));
        });
  }
  detail::update_running_statistics(running, options, saved, m2);
}

/// The same with a workspace of its own, returning what the backward pass needs.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
[[nodiscard]] batch_norm_saved batch_norm_forward(E const& exec, C const& comm,
                                                  std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                                                  affine_parameters<P> affine = {}, running_statistics<P> running = {},
                                                  batch_norm_options const& options = {}) {
  batch_norm_saved saved;
  batch_norm_workspace workspace{x.channels};
  batch_norm_forward<T, P>(exec, comm, x, y, affine, running, options, saved, workspace);
  return saved;
}

/// Batch normalization by constant statistics, y = gamma·(x − mean)/√(var + eps) + beta: inference, and training by
/// frozen statistics. Where `kind` says that var is the standard deviation, y = gamma·(x − mean)/var + beta. Not
/// collective. x, y `[N, C, S]`, y may be x; mean and var `[C]`. Throws invalid_argument_error.
template <class T, class P, host::executor E>
void batch_norm_inference(E const& exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                          affine_parameters<P> affine, std::type_identity_t<std::span<P const>> mean,
                          std::type_identity_t<std::span<P const>> var, double eps, batch_norm_saved& saved,
                          running_variance kind = running_variance::unbiased) {
  auto const channels = static_cast<std::int64_t>(mean.size());
  detail::call_check check;
  check.tensor(x, "x", channels);
  check.output(y, "y", x);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(affine.beta, "beta", channels);
  check.require(var.size() == mean.size(),
                [&] { return check.text("var has ", var.size(), " elements, mean has ", mean.size()); });
  check.eps(eps);
  detail::throw_fault("batch_norm inference", check);

  saved.scope = statistics_scope::constant;
  saved.count = 0;
  saved.mean.resize(mean.size());
  saved.inv_std.resize(var.size());
  std::ranges::transform(mean, saved.mean.begin(), as_double<P>);
  std::ranges::transform(var, saved.inv_std.begin(), as_double<P>);
  bool const is_deviation = kind == running_variance::standard_deviation;
  for (double& value : saved.inv_std) value = 1.0 / (is_deviation ? value : std::sqrt(value + eps));
  host::normalize(exec, x, y, std::span<double const>{saved.mean}, std::span<double const>{saved.inv_std}, affine);
}

} // namespace syncnorm
