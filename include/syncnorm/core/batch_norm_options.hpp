#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace syncnorm {

/// What goes into `running_var`. PyTorch, Apex and Horovod keep the unbiased variance; TensorFlow, Paddle, MXNet and Flax
/// the biased one.
enum class running_variance : std::uint8_t {
  unbiased,
  biased,
  standard_deviation, ///< 1/inv_std of the batch, by which inference then divides as it is
};

/// By which variance of a batch of n elements a channel training normalizes: Σ(x − mean)²/n, or, as LBANN does,
/// Σ(x − mean)²/(n − 1).
enum class batch_variance : std::uint8_t { biased, unbiased };

/// How ranks put their statistics together. With a communicator that has no allreduce they gather; on a GPU, ranks that reduce gather
/// their headers besides; on CPUs, in two phases and in groups, a backward pass that reduces is two allreduces.
enum class exchange_policy : std::uint8_t {
  automatic, ///< whichever the cost model of `comm/exchange_cost.hpp` says is faster
  gather,    ///< each rank gets every rank's: one allgather a pass
  reduce,    ///< each rank gets the sums: two allreduces forward, one backward, whose memory does not grow with ranks
};

/// Which affine parameters a layer has.
enum class affine_parts : std::uint8_t { gamma_and_beta, gamma, beta };

/// Whether a rank's forward pass is followed by a backward pass.
enum class backward_pass : std::uint8_t {
  possible,   ///< if another rank needs one
  needed,     ///< by this rank
  impossible, ///< this rank records nothing
};

/// Options of batch normalization; the same on every rank.
struct batch_norm_options {
  /// Added to the variance under the root; ≥ 0.
  double eps = 1e-5;
  /// Weight of the new statistic, running = (1 − momentum)·running + momentum·new, in [0, 1]. Empty: the cumulative
  /// average, whose weight is 1 / (num_batches_tracked + 1).
  std::optional<double> momentum = 0.1;
  running_variance variance = running_variance::unbiased;
  exchange_policy exchange = exchange_policy::automatic; ///< of the backward pass, too
  batch_variance normalize_by = batch_variance::biased;  ///< and the gradients with it

  friend bool operator==(batch_norm_options const&, batch_norm_options const&) = default;
};

/// The affine parameters, `[C]` each. An empty span stands for gamma = 1 or beta = 0.
template <class P>
struct affine_parameters {
  std::span<P const> gamma{}, beta{};
};

/// Where the gradients of the affine parameters go, `[C]` each. An empty span: not needed.
template <class P>
struct affine_gradients {
  std::span<P> gamma{}, beta{};
};

/// The running statistics, `[C]` each, and their counter. Empty spans: not tracked.
template <class P>
struct running_statistics {
  std::span<P> mean{}, var{};
  std::int64_t* num_batches_tracked = nullptr;
};

} // namespace syncnorm
