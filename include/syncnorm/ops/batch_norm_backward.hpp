#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/blocks.hpp>

namespace syncnorm {

/// What a backward pass is to do.
struct batch_norm_backward_options {
  /// Off: the sums are this rank's alone, as if the other ranks' gradients were zero, and the call is not collective;
  /// for the steps of a gradient accumulation but the last. The same on every rank.
  bool exchange = true;
};

namespace detail {

/// gradients.gamma += inv_std·sum_dy_xmu, gradients.beta += sum_dy, for a span of channels.
template <class P>
void add_affine_gradients(affine_gradients<P> gradients, std::span<double const> inv_std,
                          std::span<double const> sum_dy, std::span<double const> sum_dy_xmu) {
  auto const add = [](P& sum, double value) { sum = static_cast<P>(static_cast<double>(sum) + value); };
  for (std::size_t c = 0; c < gradients.gamma.size(); ++c) add(gradients.gamma[c], inv_std[c] * sum_dy_xmu[c]);
  for (std::size_t c = 0; c < gradients.beta.size(); ++c) add(gradients.beta[c], sum_dy[c]);
}

} // namespace detail

/// Gradients of `batch_norm_forward` and `batch_norm_inference`:
///
///     sum_dy = Σ dy,  sum_dy_xmu = Σ dy·(x − mean)    over all ranks
///     dx = gamma·inv_std·(dy − sum_dy/n − (x − mean)·inv_std²·sum_dy_xmu/n)
///     gradients.gamma += inv_std·sum_dy_xmu,  gradients.beta += sum_dy    over this rank, as of any other parameter
///
/// dy, x, dx `[N, C, S]`; dx may be dy or x. A default `tensor_view` for dx and empty spans for the gradients of gamma
/// and beta: not needed. Collective, one allgather, whatever gradients this rank needs; unless there is one rank, the
/// statistics are not of all ranks, or the options switch the exchange off. On an error, which every rank throws, the
/// gradients of gamma and beta are unchanged. Throws invalid_argument_error, mismatch_error, communicator_error.
template <class X, class P = accumulate_t<X>, host::executor E, communicator C>
void batch_norm_backward(E const& exec, C const& comm, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx, affine_parameters<P> affine,
                         batch_norm_saved const& saved, affine_gradients<P> gradients,
                         batch_norm_backward_options const& options, batch_norm_workspace& workspace,
                         batch_norm_caller const& caller = {}) {
  static constexpr std::string_view pass = "batch_norm backward";
  auto& exchange = workspace.exchange;
  std::int64_t const channels = exchange.channels();
  bool const wants_dx = dx.data != nullptr || dx.samples != 0 || dx.channels != 0 || dx.spatial != 0;

  detail::call_check check;
  check.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
  check.require(saved.mean.size() == static_cast<std::size_t>(channels) && saved.inv_std.size() == saved.mean.size(),
                [&] {
                  return check.text("the saved statistics have ", saved.mean.size(), " channels, expected ", channels,
                                    "; was there a forward pass?");
                });
  check.tensor(x, "x", channels);
  check.same_extents(dy, "dy", x);
  if (wants_dx) check.output(dx, "dx", x);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(gradients.gamma, "the gradient of gamma", channels);
  check.channel_values(gradients.beta, "the gradient of beta", channels);

  auto const stores = host::stores_for(dx);
  auto const reduce = [&](auto const& run, detail::channel_span part, std::span<double> sum_dy,
                          std::span<double> sum_dy_xmu) {
    host::backward_reduce(run, detail::part_of(dy, part), detail::part_of(x, part),
                          detail::part_of(std::span<double const>{saved.mean}, part), sum_dy, sum_dy_xmu);
  };
  auto const elemt = [&](auto const& run, detail::channel_span part, std::span<double const> sum_dy,
                         std::span<double const> sum_dy_xmu) {
    if (!wants_dx) return;
    host::backward_elemt(run, detail::part_of(dy, part), detail::part_of(x, part), detail::part_of(dx, part),
                         detail::part_of(std::span<double const>{saved.mean}, part),
                         detail::part_of(std::span<double const>{saved.inv_std}, part),
                         detail::part_of(affine.gamma, part), sum_dy, sum_dy_xmu, saved.count, stores);
  };
  auto const add_gradients = [&](detail::channel_span part, std::span<double const> sum_dy,
                                 std::span<double const> sum_dy_xmu) {
    detail::add_affine_gradients<P>({detail::part_of(gradients.gamma, part), detail::part_of(gradients.beta, part)},
                                    detail::part_of(std::span<double const>{saved.inv_std}, part), sum_dy, sum_dy_xmu);
  };
  auto const start_sums = [&] {
    workspace.first.assign(static_cast<std::size_t>(channels), 0.0);
    workspace.second.assign(static_cast<std::size_t>(channels), 0.0);
  };
  auto const sums = [&](detail::channel_span part) {
    return std::pair{detail::part_of(std::span{workspace.first}, part),
                     detail::part_of(std::span{workspace.second}, part)};
  };

  if (size(comm) == 1 || saved.scope != statistics_scope::all_ranks || !options.exchange) {
    detail::throw_fault(pass, check);
    start_sums();
    detail::for_each_block(exec, x, 2, [&](auto const& run, detail::channel_span part) {
      auto const [sum_dy, sum_dy_xmu] = sums(part);
      reduce(run, part, sum_dy, sum_dy_xmu);
      elemt(run, part, sum_dy, sum_dy_xmu);
      add_gradients(part, sum_dy, sum_dy_xmu);
    });
    return;
  }

  auto own = detail::make_header<std::remove_const_t<X>>(pass, channels, x.count(), check);
  own.part_channels = check.failed() ? 1 : detail::part_channels(comm, x, 2);
  exchange.run(
      comm, own, workspace.backward_plan,
      [&](detail::exchange_part const& part) {
        if (!check.failed()) reduce(exec, part.channels, part.first, part.second);
      },
      start_sums,
      [&](detail::exchange_part const& part) {
        auto const [sum_dy, sum_dy_xmu] = sums(part.channels);
        detail::sum_ranks(exchange, part, sum_dy, sum_dy_xmu);
        elemt(exec, part.channels, sum_dy, sum_dy_xmu);
      });
  for (auto const& part : exchange.parts()) add_gradients(part.channels, part.first, part.second);
}

/// The same with a workspace of its own.
template <class X, class P = accumulate_t<X>, host::executor E, communicator C>
void batch_norm_backward(E const& exec, C const& comm, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx, affine_parameters<P> affine,
                         batch_norm_saved const& saved, affine_gradients<P> gradients = {},
                         batch_norm_backward_options const& options = {}) {
  batch_norm_workspace workspace{static_cast<std::int64_t>(saved.mean.size()), true};
  batch_norm_backward<X, P>(exec, comm, dy, x, dx, affine, saved, gradients, options, workspace);
}

} // namespace syncnorm
