#pragma once

#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/ops/detail/sum_exchange.hpp>

namespace syncnorm {

/// What the caller of a pass knows and the pass cannot see. It joins the exchange.
struct power_norm_caller {
  std::string_view fault{}; ///< what is wrong on this rank, which every rank then throws; empty: nothing
  bool records = true;      ///< whether a backward pass can follow; of the forward pass alone
};

namespace detail {

/// What a forward pass leaves for its backward passes; complete once its exchange is.
struct power_norm_pass {
  bool constant = false; ///< by the running state, which has no gradient: nothing is exchanged
  bool complete = false;
  bool faulty = false;            ///< this rank reported a fault, and its y was not written
  std::exception_ptr error;       ///< why it will never be complete
  bool failed_here_alone = false; ///< perhaps, where others were in another pass; else on every rank
  std::int64_t step = 0;
  std::int64_t count = 0; ///< positions that count, over all ranks; 0: the pass leaves no trace in the state
  std::int64_t samples = 0, spatial = 0;
  std::vector<double> inv_z;           ///< z = u·inv_z
  std::vector<double> inv_dx;          ///< dx is divided by this root
  std::vector<double> counted, masked; ///< Σ u² of this rank
  std::vector<std::uint8_t> mask;      ///< a copy, where the backward pass needs it

  /// As made, but for the memory.
  void clear() {
    constant = complete = faulty = failed_here_alone = false;
    error = nullptr;
    step = count = samples = spatial = 0;
    for (auto* const values : {&inv_z, &inv_dx, &counted, &masked}) values->clear();
    mask.clear();
  }
};

/// Passes of a layer, of which those that nobody else refers to any more are used again.
class power_norm_passes {
public:
  [[nodiscard]] std::shared_ptr<power_norm_pass> make() {
    for (auto const& pass : passes_) {
      static_cast<void>(std::shared_ptr<power_norm_pass>{pass}); // sees what the last one to let go of it has done
      if (pass.use_count() != 1) continue;
      pass->clear();
      return pass;
    }
    auto pass = std::make_shared<power_norm_pass>();
    if (passes_.size() < most) passes_.push_back(pass);
    return pass;
  }

private:
  static constexpr std::size_t most = 4;

  std::vector<std::shared_ptr<power_norm_pass>> passes_;
};

/// Per channel: what the backward pass multiplies dy and u with, for this rank's dx and Σ gh·z.
struct power_norm_factors {
  std::vector<double> weight, share, dy_scale, u_scale, sum_dy, sum_dy_u;

  /// `kept` is 1 − alpha_backward, or 0 where the statistics are constant.
  template <class P>
  void prepare(power_norm_pass const& pass, std::span<P const> gamma, std::span<P const> ema_gz, double kept) {
    auto const channels = pass.inv_z.size();
    for (auto* const values : {&weight, &share, &dy_scale, &u_scale, &sum_dy, &sum_dy_u}) values->assign(channels, 0.0);
    for (std::size_t c = 0; c < channels; ++c) {
      weight[c] = gamma.empty() ? 1.0 : as_double(gamma[c]);
      share[c] = kept == 0 ? 0.0 : kept * as_double(ema_gz[c]);
      dy_scale[c] = weight[c] * pass.inv_dx[c];
      u_scale[c] = -share[c] * pass.inv_z[c] * pass.inv_dx[c];
    }
  }

  /// gradients.gamma += Σ dy·z, gradients.beta += Σ dy.
  template <class P>
  void add_to(affine_gradients<P> gradients, power_norm_pass const& pass) const {
    auto const add = [](P& sum, double value) { sum = from_double<P>(as_double(sum) + value); };
    for (std::size_t c = 0; c < gradients.gamma.size(); ++c) add(gradients.gamma[c], pass.inv_z[c] * sum_dy_u[c]);
    for (std::size_t c = 0; c < gradients.beta.size(); ++c) add(gradients.beta[c], sum_dy[c]);
  }
};

/// Throws where what became of the sums of `exchange` is not finite.
template <class Exchange>
void require_finite(std::string_view pass, char const* what, std::span<double const> values, Exchange const& exchange) {
  for (std::size_t c = 0; c < values.size(); ++c)
    if (!std::isfinite(values[c])) {
      std::size_t const rank = exchange.rank_not_finite(c);
      std::string const whose = rank < exchange.headers().size() ? " by the sum of rank " + std::to_string(rank) : "";
      throw invalid_argument_error{std::string{pass} + ": " + what + " of channel " + std::to_string(c) +
                                   " would become " + to_text(values[c]) + whose + "; the state is unchanged"};
    }
}

template <class P>
void assign(std::span<P> to, std::span<double const> from) {
  for (std::size_t c = 0; c < to.size(); ++c) to[c] = from_double<P>(from[c]);
}

} // namespace detail

/// What a forward pass leaves for its backward pass, besides x. Copies share it.
struct power_norm_saved {
  std::shared_ptr<detail::power_norm_pass> pass;
};

/// The exchanges of one layer that are in flight, and what becomes of the state when they have arrived. Use it, with the
/// same communicator and state, on every rank for the same calls; the state must outlive it or its last `synchronize`. Its
/// destruction waits for what is in flight, and leaves the state as it is then.
template <communicator C, class P>
requires allgathers<C, std::byte>
class power_norm_workspace {
public:
  explicit power_norm_workspace(std::int64_t channels) : channels_{channels} {}

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }

  /// Whether an exchange has been started that no call has waited for, or whose failure none has thrown.
  [[nodiscard]] bool in_flight() const noexcept { return forward_.pending || failure_ || backward_.pending; }

  /// Whether the next forward pass is one of the warm-up, as far as the latest one tells.
  [[nodiscard]] bool warms_up() const noexcept { return warms_up_; }

  /// Waits for all exchanges that are in flight, and brings the state up to date. Throws what is wrong with one of them, once, on
  /// every rank, and leaves the next to the next call; the state is then as it was before the pass that failed. Local, but what it
  /// throws, it throws on the ranks that call it: call it on all.
  void synchronize() {
    finish_forward();
    finish_backward();
  }

  /// What a forward pass leaves for its backward passes, in memory of earlier ones.
  [[nodiscard]] std::shared_ptr<detail::power_norm_pass> make_pass() { return passes_.make(); }
  /// For a backward pass.
  [[nodiscard]] detail::power_norm_factors& factors() noexcept { return factors_; }

  /// This rank's Σ u², to be filled before `start_forward`.
  [[nodiscard]] std::span<double> prepare_forward(C const& comm) { return prepare(forward_, comm); }
  /// The same for Σ gh·z.
  [[nodiscard]] std::span<double> prepare_backward(C const& comm) { return prepare(backward_, comm); }

  /// Starts the exchange of a forward pass, and waits for it in the warm-up, as far as the latest pass tells, and where `needs_result`.
  /// Ranks may differ in that, and in their step; so what is wrong is thrown here in the warm-up alone, and else by the next call.
  void start_forward(C const& comm, detail::power_norm_header const& own, power_norm_options const& options,
                     power_norm_state<P> const& state, std::shared_ptr<detail::power_norm_pass> pass,
                     bool needs_result) {
    start(forward_, comm, own, options, state, std::move(pass));
    if (warms_up_ || !overlaps(comm)) return finish_forward();
    if (!needs_result) return;
    try {
      finish_forward();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  void start_backward(C const& comm, detail::power_norm_header const& own, power_norm_options const& options,
                      power_norm_state<P> const& state, std::shared_ptr<detail::power_norm_pass> pass) {
    start(backward_, comm, own, options, state, std::move(pass));
    if (!overlaps(comm)) finish_backward();
  }

  /// Completes the forward pass in flight: running_phi, the number of steps, and what the backward pass needs.
  void finish_forward() {
    // Where there is nothing to do, nothing is written, as passes by constant statistics may be in several threads.
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (!forward_.pending) return;
    forward_.pending = false;
    auto const pass = std::exchange(forward_.pass, nullptr);
    try {
      forward_.exchange.finish(*forward_.comm, sums_);
      agreed_ = true;
      commit_forward(*pass);
    } catch (communicator_error const&) { // which no rank can use any more
      pass->error = std::current_exception();
      throw;
    } catch (...) {
      pass->error = std::current_exception();
      pass->failed_here_alone = !forward_.exchange.is_of_one_pass();
      throw;
    }
    pass->complete = true;
  }

  /// Completes the backward pass in flight: ema_gz.
  void finish_backward() {
    if (!std::exchange(backward_.pending, false)) return;
    auto const pass = std::exchange(backward_.pass, nullptr);
    backward_.exchange.finish(*backward_.comm, sums_);
    agreed_ = true;
    auto const count = count_of(backward_);
    if (pass->count == 0 || count == 0) return;
    auto const ema_gz = backward_.state.ema_gz;
    for (std::size_t c = 0; c < sums_.size(); ++c)
      sums_[c] = as_double(from_double<P>(as_double(ema_gz[c]) + sums_[c] / static_cast<double>(count)));
    detail::require_finite("power_norm backward", "ema_gz", sums_, backward_.exchange);
    detail::assign(ema_gz, sums_);
  }

private:
  struct flight {
    bool pending = false;
    std::optional<C> comm;
    power_norm_options options;
    power_norm_state<P> state;
    std::shared_ptr<detail::power_norm_pass> pass;
    detail::sum_exchange<C> exchange;
  };

  [[nodiscard]] std::span<double> prepare(flight& each, C const& comm) {
    auto const own = each.exchange.prepare(comm, channels_, agreed_);
    sums_.resize(own.size());
    return own;
  }

  [[nodiscard]] bool overlaps(C const& comm) const {
    return agreed_ && syncnorm::size(comm) > 1 && detail::sum_exchange<C>::can_overlap();
  }

  void start(flight& each, C const& comm, detail::power_norm_header const& own, power_norm_options const& options,
             power_norm_state<P> const& state, std::shared_ptr<detail::power_norm_pass> pass) {
    each.comm.emplace(comm);
    each.options = options;
    each.state = state;
    each.exchange.start(comm, own);
    each.pass = std::move(pass);
    each.pending = true;
  }

  [[nodiscard]] static std::int64_t count_of(flight const& each) {
    std::int64_t count = 0;
    for (auto const& header : each.exchange.headers()) count += header.count;
    return count;
  }

  void commit_forward(detail::power_norm_pass& pass) {
    auto const& options = forward_.options;
    auto const& state = forward_.state;
    bool const corrected = options.recursion == power_norm_recursion::corrected;
    auto const t = static_cast<double>(pass.step), warmup = static_cast<double>(options.warmup_iters);
    bool const by_batch = pass.step <= options.warmup_iters;
    pass.count = count_of(forward_);
    auto& phi = sums_; // becomes the batch's second moment, then running_phi
    auto const inverse_root = [&](double value) { return 1.0 / std::sqrt(value + options.eps); };
    if (pass.count == 0) {
      for (std::size_t c = 0; c < phi.size(); ++c)
        pass.inv_z[c] = pass.inv_dx[c] = inverse_root(as_double(state.running_phi[c]));
      return;
    }
    for (std::size_t c = 0; c < phi.size(); ++c) {
      double const of_batch = phi[c] / static_cast<double>(pass.count);
      double running = as_double(state.running_phi[c]);
      // In the reference, the cumulative average ends one step before the warm-up, and the moving one goes on top of it.
      bool const averages = corrected ? by_batch : t < warmup;
      if (averages) running = running * ((t - 1) / t) + of_batch / t;
      if (!corrected || !averages) running = options.alpha_forward * running + (1 - options.alpha_forward) * of_batch;
      if (by_batch) pass.inv_z[c] = inverse_root(of_batch);
      pass.inv_dx[c] = corrected ? pass.inv_z[c] : inverse_root(of_batch);
      phi[c] = as_double(from_double<P>(running));
    }
    detail::require_finite("power_norm forward", "running_phi", phi, forward_.exchange);
    detail::assign(state.running_phi, std::span<double const>{phi});
    ++*state.iters;
    warms_up_ = pass.step < options.warmup_iters;
  }

  std::int64_t channels_;
  bool agreed_ = false, warms_up_ = true;
  std::exception_ptr failure_; ///< of a forward pass that had to wait where other ranks need not
  std::vector<double> sums_;
  detail::power_norm_passes passes_;
  detail::power_norm_factors factors_;
  flight forward_, backward_;
};

} // namespace syncnorm
