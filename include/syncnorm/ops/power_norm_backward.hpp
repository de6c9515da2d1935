#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/power_backward.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/power_norm_checks.hpp>
#include <syncnorm/ops/power_norm_forward.hpp>
#include <syncnorm/ops/power_norm_state.hpp>

namespace syncnorm {

/// Gradients of `power_norm_forward` and `power_norm_inference`. With g = dy·gamma, z as in the forward pass, ema_gz from
/// before this pass, and the mean over all positions of all ranks, masked or not:
///
///     gh = g − (1 − alpha_backward)·ema_gz·z,  du = gh/√(phi + eps),  ema_gz += mean of gh·z
///     gradients.gamma += Σ dy·z,  gradients.beta += Σ dy    over this rank, as of any other parameter
///
/// where du goes through the scaling of groups to dx. `power_norm_recursion` names what the corrected recursion changes. After
/// inference dx = dy·gamma/√(running_phi + eps) through the scaling, nothing is exchanged and ema_gz is unchanged. After a forward
/// pass in which no position counted phi is running_phi, and ema_gz is unchanged, though dx is by it as above.
///
/// dy, x, dx `[N, C, S]`; dx may be dy or x, and may not overlap them otherwise. A default `tensor_view` for dx and empty
/// spans for the gradients of gamma and beta: not needed. Several backward passes of one forward pass, and forward passes between, are legal: every backward pass
/// is a step of ema_gz. Collective, one allgather, whatever gradients this rank needs; none with one rank. It waits for the
/// forward pass and for the backward pass before, but not for its own exchange, if the communicator has `allgather_async`:
/// then what is wrong with it on any rank is thrown on every rank by the next backward pass or `workspace.synchronize()`,
/// and gradients of this rank have been given already. On an error, whenever it is thrown, ema_gz is unchanged.
/// Throws what the forward pass left to throw, invalid_argument_error, mismatch_error, communicator_error.
template <class X, class P = accumulate_t<X>, communicator C>
void power_norm_backward(host::executor_ref exec, C const& comm, tensor_view<X> dy,
                         std::type_identity_t<tensor_view<X const>> x,
                         std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx, affine_parameters<P> affine,
                         power_norm_state<P> const& state, power_norm_options const& options,
                         power_norm_saved const& saved, affine_gradients<P> gradients,
                         power_norm_workspace<C, P>& workspace, power_norm_caller const& caller = {}) {
  using T = std::remove_const_t<X>;
  static constexpr std::string_view name = "power_norm backward";
  // Passes by constant statistics, which may be in several threads at once, wait for nothing.
  bool const constant = saved.pass != nullptr && saved.pass->constant;
  if (!constant) workspace.finish_forward();
  std::exception_ptr const failure = saved.pass != nullptr ? saved.pass->error : nullptr;
  // What failed on every rank, none of them exchanges anything for now.
  if (failure != nullptr && !saved.pass->failed_here_alone) std::rethrow_exception(failure);
  if (!constant) workspace.finish_backward();
  std::int64_t const channels = workspace.channels();
  bool const wants_dx = dx.is_given();

  detail::call_check check;
  check.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
  check.require(failure == nullptr, [&] {
    return "the forward pass failed: " + detail::thrown_by([&] { std::rethrow_exception(failure); });
  });
  check.require(saved.pass != nullptr && saved.pass->complete, [] { return "there was no forward pass"; });
  check.tensor(x, "x", channels);
  if (!check.failed()) {
    check.require(saved.pass->inv_z.size() == static_cast<std::size_t>(channels), [&] {
      return check.text("the forward pass had ", saved.pass->inv_z.size(), " channels, expected ", channels);
    });
    check.require(x.samples == saved.pass->samples && x.spatial == saved.pass->spatial, [&] {
      return check.text("x has ", x.samples, " samples of ", x.spatial, ", in the forward pass ", saved.pass->samples,
                        " of ", saved.pass->spatial);
    });
  }
  check.same_extents(dy, "dy", x);
  if (wants_dx) {
    check.output(dx, "dx", x);
    check.apart<T>(dx, "dx", dy, "dy", true);
    check.apart<T>(dx, "dx", x, "x", true);
  }
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(gradients.gamma, "the gradient of gamma", channels);
  check.channel_values(gradients.beta, "the gradient of beta", channels);
  detail::check_options(check, options, channels);
  detail::check_state(check, state, channels);
  if (constant || syncnorm::size(comm) == 1) detail::throw_fault(name, check);

  std::optional<detail::power_norm_factors> own_factors;
  detail::power_norm_factors& factors = constant ? own_factors.emplace() : workspace.factors();
  bool const corrected = options.recursion == power_norm_recursion::corrected;
  auto const own = [&](detail::power_norm_pass const& pass) {
    factors.prepare<P>(pass, affine.gamma, state.ema_gz, constant ? 0.0 : 1 - options.alpha_backward);
    mask_view const mask = pass.mask.empty() ? mask_view{} : mask_of(pass.mask.data(), pass.samples, pass.spatial);
    host::power_backward<T>(exec, dy, x, wants_dx ? dx : tensor_view<T>{}, mask, detail::scaling_of(options),
                            factors.dy_scale, factors.u_scale, factors.sum_dy, factors.sum_dy_u);
    return mask;
  };
  if (constant) {
    own(*saved.pass);
    factors.add_to(gradients, *saved.pass);
    return;
  }

  auto const sums = workspace.prepare_backward(comm);
  auto header = detail::make_power_norm_header<T>(name, channels, options, check);
  auto pass = saved.pass != nullptr ? saved.pass : workspace.make_pass();
  header.step = pass->step;
  detail::run_or_report(comm, header, [&] {
    auto const mask = own(*pass);
    header.count = host::count_positions(x.samples, x.spatial, mask);
    for (std::size_t c = 0; c < sums.size(); ++c) {
      double const squares = pass->counted[c] + (corrected ? 0.0 : pass->masked[c]);
      sums[c] =
          pass->inv_z[c] * (factors.weight[c] * factors.sum_dy_u[c] - factors.share[c] * pass->inv_z[c] * squares);
    }
  });
  bool const faulty = header.fault[0] != '\0';
  workspace.start_backward(comm, header, options, state, pass);
  if (!faulty) factors.add_to(gradients, *pass);
}

} // namespace syncnorm
