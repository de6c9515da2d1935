#pragma once

#include <cstdint>
#include <span>

#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>

namespace syncnorm::detail {

inline void check_options(call_check& check, power_norm_options const& options, std::int64_t channels) {
  check.eps(options.eps);
  auto const alpha = [&](double value, char const* name) {
    check.require(value >= 0 && value <= 1,
                  [&] { return check.text(name, " is ", value, ", expected a number in [0, 1]"); });
  };
  alpha(options.alpha_forward, "alpha_forward");
  alpha(options.alpha_backward, "alpha_backward");
  check.require(options.warmup_iters >= 0,
                [&] { return check.text("warmup_iters is ", options.warmup_iters, ", expected at least 0"); });
  if (options.groups != 0) check.groups(channels, options.groups);
  check.eps(options.group_eps, "group_eps");
}

template <class P>
void check_state(call_check& check, power_norm_state<P> const& state, std::int64_t channels) {
  auto const expected = static_cast<std::size_t>(channels > 0 ? channels : 0);
  auto const values = [&](std::span<P> of_state, char const* name) {
    check.require(of_state.size() == expected,
                  [&] { return check.text(name, " has ", of_state.size(), " elements, expected ", expected); });
  };
  values(state.running_phi, "running_phi");
  values(state.ema_gz, "ema_gz");
  check.require(state.iters != nullptr, [] { return "iters is null"; });
  check.require(state.iters == nullptr || *state.iters >= 0,
                [&] { return check.text("iters is ", *state.iters, ", expected at least 0"); });
  if (state.iters != nullptr) check.counts_on(*state.iters, "iters");
}

} // namespace syncnorm::detail
