#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_in_blocks.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/parts.hpp>

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
  auto const add = [](P& sum, double value) { sum = from_double<P>(as_double(sum) + value); };
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

  auto const start_sums = [&] {
    workspace.first.assign(static_cast<std::size_t>(channels), 0.0);
    workspace.second.assign(static_cast<std::size_t>(channels), 0.0);
  };
  std::span<double const> const mean{saved.mean}, inv_std{saved.inv_std};

  if (size(comm) == 1 || saved.scope != statistics_scope::all_ranks || !options.exchange) {
    detail::throw_fault(pass, check);
    start_sums();
    std::span const sum_dy{workspace.first}, sum_dy_xmu{workspace.second};
    if (wants_dx)
      host::backward_in_blocks(exec, dy, x, dx, mean, inv_std, affine.gamma, sum_dy, sum_dy_xmu, saved.count);
    else
      host::backward_reduce(exec, dy, x, mean, sum_dy, sum_dy_xmu);
    detail::add_affine_gradients(gradients, inv_std, sum_dy, sum_dy_xmu);
    return;
  }

  auto const stores = host::stores_for(dx);
  auto own = detail::make_header<std::remove_const_t<X>>(pass, channels, x.count(), check);
  auto const parts = check.failed() ? detail::part_choice{1, false} : detail::choose_parts(comm, x, 2);
  own.part_channels = parts.channels;
  workspace.backward_plan.ahead = parts.ahead;
  exchange.run(
      comm, own, workspace.backward_plan,
      [&](detail::exchange_part const& part) {
        if (!check.failed())
          host::backward_reduce(exec, detail::part_of(dy, part.channels), detail::part_of(x, part.channels),
                                detail::part_of(mean, part.channels), part.first, part.second);
      },
      start_sums,
      [&](detail::exchange_part const& part) {
        auto const sum_dy = detail::part_of(std::span{workspace.first}, part.channels);
        auto const sum_dy_xmu = detail::part_of(std::span{workspace.second}, part.channels);
        detail::sum_ranks(exchange, part, sum_dy, sum_dy_xmu);
        if (!wants_dx) return;
        host::backward_elemt(exec, detail::part_of(dy, part.channels), detail::part_of(x, part.channels),
                             detail::part_of(dx, part.channels), detail::part_of(mean, part.channels),
                             detail::part_of(inv_std, part.channels), detail::part_of(affine.gamma, part.channels),
                             sum_dy, sum_dy_xmu, saved.count, stores, detail::part_after(x, 2, part.channels));
      });
  for (auto const& part : exchange.parts())
    detail::add_affine_gradients<P>(
        {detail::part_of(gradients.gamma, part.channels), detail::part_of(gradients.beta, part.channels)},
        detail::part_of(inv_std, part.channels), part.first, part.second);
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
