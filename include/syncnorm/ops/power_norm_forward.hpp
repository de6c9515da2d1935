#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/power_forward.hpp>
#include <syncnorm/host/second_moments.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/power_norm_checks.hpp>
#include <syncnorm/ops/power_norm_state.hpp>

namespace syncnorm {

namespace detail {

[[nodiscard]] inline host::channel_scaling scaling_of(power_norm_options const& options) {
  return {options.groups, options.group_eps};
}

/// Makes every element no number.
template <class T>
void fill_with_none(tensor_view<T> const& y) {
  auto const none = from_accumulate<T>(std::numeric_limits<accumulate_t<T>>::quiet_NaN());
  for (std::int64_t n = 0; n < y.samples; ++n)
    for (std::int64_t c = 0; c < y.channels; ++c)
      for (std::int64_t s = 0; s < y.spatial; ++s) y(n, c, s) = none;
}

/// 1/√(value + eps) of each value.
template <class P>
void inverse_roots(std::span<P> values, double eps, std::vector<double>& roots) {
  roots.clear();
  for (auto const value : values) roots.push_back(1.0 / std::sqrt(as_double(value) + eps));
}

} // namespace detail

/// Power normalization over the batch of all ranks, in training. t = iters + 1 numbers the step, u is x with its groups of
/// channels scaled where the options say so, and phi the mean of u² over the positions of all ranks that count:
///
///     z = u/√(phi + eps) while t ≤ warmup_iters, then u/√(running_phi + eps);  y = gamma·z + beta
///     running_phi = running_phi·(t − 1)/t + phi/t                        while t < warmup_iters
///     running_phi = alpha_forward·running_phi + (1 − alpha_forward)·phi  always
///
/// where z takes running_phi from before the step. `power_norm_recursion` names what the corrected recursion changes.
///
/// x, y `[N, C, S]`; mask `[N, S]`, not 0 where a position counts, the reverse of the authors' pad_mask; y may be x,
/// and may not overlap it otherwise; N and S may differ between ranks and be zero. Masked positions are normalized like the others.
/// Collective: one allgather, none with one rank, and one more in a workspace's first pass where there are more than
/// 128 channels. In the warm-up and in that pass it waits for them. Afterwards it returns when y is written, with the exchange in
/// flight, if the communicator has `allgather_async`: then what is wrong with the step on any rank is thrown on every rank by the
/// next call that needs its result: its backward pass, the next forward pass or `workspace.synchronize()`. (Throwing at once, a
/// rank would leave its peers alone in what it calls next.) Until then the state must not be read. So it is in a warm-up that begins
/// again after steps beyond it, where ranks may differ in whether it does; y is no numbers then, but on a rank whose arguments are wrong.
/// Where no position of any rank counts, z = u/√(running_phi + eps) and the state is unchanged. Squares are taken and summed in
/// `accumulate_t<T>`, so that of float x of more than some 1e18, or less than 1e-18 by an eps of 0, cannot be normalized.
///
/// On an error, whenever it is thrown, the state is unchanged; but not by what an executor, or a want of memory, throws in the warm-up
/// once the ranks have exchanged, which have all moved it: that is thrown here alone, and then by the backward pass on every rank. Throws
/// invalid_argument_error (an argument of any rank; a running_phi that would not be finite), mismatch_error, communicator_error.
/// Source: Shen et al., "PowerNorm: Rethinking batch normalization in transformers", 2020, and its authors' code.
template <class T, class P = accumulate_t<T>, communicator C>
void power_norm_forward(host::executor_ref exec, C const& comm, std::type_identity_t<tensor_view<T const>> x,
                        tensor_view<T> y, mask_view const& mask, affine_parameters<P> affine,
                        power_norm_state<P> const& state, power_norm_options const& options, power_norm_saved& saved,
                        power_norm_workspace<C, P>& workspace, power_norm_caller const& caller = {}) {
  static constexpr std::string_view name = "power_norm forward";
  saved.pass.reset();
  auto const pass = saved.pass = workspace.make_pass();
  try {
    workspace.finish_forward();
  } catch (...) {
    pass->error = std::current_exception(); // no rank has begun this one
    throw;
  }
  std::int64_t const channels = workspace.channels();

  detail::call_check check;
  check.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
  check.require(channels >= 0, [&] { return check.text("the number of channels is negative: ", channels); });
  check.tensor(x, "x", channels);
  check.output(y, "y", x);
  check.apart<T>(y, "y", x, "x", true);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(affine.beta, "beta", channels);
  detail::check_options(check, options, channels);
  detail::check_state(check, state, channels);
  check.mask(mask, "the mask", x);
  if (syncnorm::size(comm) == 1) detail::throw_fault(name, check);

  auto const scaling = detail::scaling_of(options);
  bool const corrected = options.recursion == power_norm_recursion::corrected;
  auto const own_sums = workspace.prepare_forward(comm);
  bool const has_next = state.iters != nullptr && *state.iters < std::numeric_limits<std::int64_t>::max();
  pass->step = has_next ? *state.iters + 1 : 0;
  // Where this rank cannot tell, as the others do, so that it throws where they throw.
  bool const tells = has_next && *state.iters >= 0 && options.warmup_iters >= 0;
  bool const by_batch = tells ? pass->step <= options.warmup_iters : workspace.warms_up();
  auto own = detail::make_power_norm_header<T>(name, channels, options, check);
  own.step = pass->step;
  own.affine = (affine.gamma.empty() ? 0 : 1) + (affine.beta.empty() ? 0 : 2);
  own.records = caller.records ? 1 : 0;
  auto const compute = [&] {
    for (auto* const values : {&pass->inv_z, &pass->inv_dx, &pass->counted, &pass->masked})
      values->assign(own_sums.size(), 0.0);
    pass->samples = x.samples;
    pass->spatial = x.spatial;
    own.count = host::count_positions(x.samples, x.spatial, mask);
    if (corrected && mask.data != nullptr && x.count() > 0)
      for (std::int64_t n = 0; n < x.samples; ++n)
        for (std::int64_t s = 0; s < x.spatial; ++s) pass->mask.push_back(mask(n, s) ? 1 : 0);
    if (by_batch) {
      host::second_moments(exec, x, mask, scaling, pass->counted, pass->masked);
    } else {
      detail::inverse_roots(state.running_phi, options.eps, pass->inv_z);
      host::power_forward<T>(exec, x, y, mask, scaling, pass->inv_z, affine, pass->counted, pass->masked);
    }
    std::ranges::copy(pass->counted, own_sums.begin());
  };
  detail::run_or_report(comm, own, compute);
  pass->faulty = own.fault[0] != '\0';
  workspace.start_forward(comm, own, options, state, pass, /*needs_result=*/by_batch);
  if (!by_batch) return;
  if (!pass->complete) {
    if (!pass->faulty) detail::fill_with_none(y);
    return;
  }
  try {
    host::power_normalize<T>(exec, x, y, scaling, pass->inv_z, affine);
  } catch (...) {
    pass->complete = false; // so that its backward pass tells the others
    throw;
  }
}

/// Power normalization by constant statistics, y = gamma·u/√(running_phi + eps) + beta: inference. Not collective; the
/// state must be up to date (`workspace.synchronize()`). x, y `[N, C, S]`, y may be x; running_phi `[C]`. Throws
/// invalid_argument_error.
template <class T, class P>
void power_norm_inference(host::executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                          affine_parameters<P> affine, std::type_identity_t<std::span<P const>> running_phi,
                          power_norm_options const& options, power_norm_saved& saved) {
  saved.pass.reset();
  auto const channels = static_cast<std::int64_t>(running_phi.size());
  detail::call_check check;
  check.tensor(x, "x", channels);
  check.output(y, "y", x);
  check.apart<T>(y, "y", x, "x", true);
  check.channel_values(affine.gamma, "gamma", channels);
  check.channel_values(affine.beta, "beta", channels);
  detail::check_options(check, options, channels);
  detail::throw_fault("power_norm inference", check);

  auto const pass = std::make_shared<detail::power_norm_pass>();
  pass->constant = pass->complete = true;
  pass->samples = x.samples;
  pass->spatial = x.spatial;
  detail::inverse_roots(running_phi, options.eps, pass->inv_z);
  pass->inv_dx = pass->inv_z;
  host::power_normalize<T>(exec, x, y, detail::scaling_of(options), pass->inv_z, affine);
  saved.pass = pass;
}

} // namespace syncnorm
