#pragma once

#include <cstdint>
#include <span>

namespace syncnorm {

/// Which recursion power norm follows.
enum class power_norm_recursion : std::uint8_t {
  /// The authors' code, to the letter.
  reference,
  /// The authors' code but for four things:
  /// 1. The averages of the warm-up and of the time after it do not mix: running_phi is the cumulative average alone in
  ///    steps t ≤ warmup_iters, and the moving average alone afterwards. In the reference the moving average is taken in
  ///    every step, on top of the cumulative one.
  /// 2. The cumulative average includes step t = warmup_iters; in the reference it ends one step before z does so.
  /// 3. dx divides by what z was divided by, √(running_phi + eps) after the warm-up; in the reference always by the
  ///    batch's own √(phi + eps).
  /// 4. Padding has no part in the backward pass: dy counts as 0 there, dx is 0, and neither ema_gz nor the gradients of
  ///    gamma and beta nor the number that they average over include it. In the reference all do.
  corrected,
};

/// Options of power normalization; the same on every rank.
struct power_norm_options {
  /// Added to the second moment under the root; ≥ 0.
  double eps = 1e-5;
  /// Weights of the old values in the moving averages running_phi and ema_gz, in [0, 1].
  double alpha_forward = 0.9, alpha_backward = 0.9;
  /// Steps in which z is divided by the batch's own second moment; ≥ 0.
  std::int64_t warmup_iters = 10000;
  /// Groups of channels that are scaled to a mean square of 1 at each position first; see `host::group_scaling`. 0: no
  /// scaling.
  std::int64_t groups = 0;
  /// Added to the mean square of a group under the root; ≥ 0.
  double group_eps = 1e-5;
  power_norm_recursion recursion = power_norm_recursion::reference;

  friend bool operator==(power_norm_options const&, power_norm_options const&) = default;
};

/// What power norm carries from step to step: `[C]` each, running_phi = 1 and ema_gz = 0 at first, and the number of steps
/// taken.
template <class P>
struct power_norm_state {
  std::span<P> running_phi{}, ema_gz{};
  std::int64_t* iters = nullptr;
};

} // namespace syncnorm
