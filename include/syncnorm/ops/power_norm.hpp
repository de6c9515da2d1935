#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/ops/power_norm_backward.hpp>
#include <syncnorm/ops/power_norm_forward.hpp>

namespace syncnorm {

/// How a power norm layer is made; the same on every rank.
struct power_norm_layer_options {
  power_norm_options norm{};
  bool affine = true; ///< gamma and beta exist and are learned
};

/// A power normalization layer whose statistics span the ranks of `C`. It owns the parameters (`P`, gamma = 1, beta = 0),
/// their gradients, and the state (running_phi = 1, ema_gz = 0, iters = 0).
///
/// Construction is local and checks nothing: what is wrong with the options is reported by the first forward pass, on
/// every rank. Exchanges may be in flight between calls, as `power_norm_forward` and `power_norm_backward` say; whatever
/// reads the state waits for them first, and throws what is wrong with them. Errors leave the state as it was before the
/// pass that failed, but for what an executor or a want of memory throws in the warm-up after the exchange. Destruction waits
/// for what is in flight.
template <mutable_element T, communicator C = self_communicator, host::executor E = host::serial_executor,
          mutable_element P = accumulate_t<T>>
requires std::copy_constructible<C>
class power_norm {
public:
  explicit power_norm(C comm, std::int64_t channels, power_norm_layer_options const& options = {}, E exec = {})
      : comm_{std::move(comm)}, exec_{std::move(exec)}, options_{options}, state_{std::make_unique<owned_state>()},
        workspace_{channels} {
    auto const c = static_cast<std::size_t>(channels > 0 ? channels : 0);
    if (options.affine) {
      gamma_.assign(c, from_double<P>(1));
      beta_.assign(c, from_double<P>(0));
      gamma_grad_.assign(c, from_double<P>(0));
      beta_grad_.assign(c, from_double<P>(0));
    }
    state_->running_phi.assign(c, from_double<P>(1));
    state_->ema_gz.assign(c, from_double<P>(0));
  }
  power_norm(power_norm&&) = default;
  power_norm& operator=(power_norm&&) = delete;

  /// y = power_norm(x). `[N, C, S]`, mask `[N, S]`; y may be x unless a backward pass follows, which needs x. In training
  /// mode collective and as `power_norm_forward`; in evaluation mode local, by running_phi, and without regard to the mask.
  void forward(tensor_view<T const> x, tensor_view<T> y, mask_view const& mask = {}) {
    affine_parameters<P> const affine{gamma_, beta_};
    if (training_) {
      power_norm_forward<T, P>(exec_, comm_, x, y, mask, affine, state(), options_.norm, saved_, workspace_);
    } else {
      workspace_.finish_forward();
      power_norm_inference<T, P>(exec_, x, y, affine, state_->running_phi, options_.norm, saved_);
    }
  }

  /// dx for the latest forward pass, whose x this has to be; adds to the gradients of gamma and beta. As
  /// `power_norm_backward`; a default `dx`: not needed.
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx) { backward(saved_, x, dy, dx); }
  /// The same for an earlier forward pass, that left `of`.
  void backward(power_norm_saved const& of, tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx) {
    power_norm_backward<T const, P>(exec_, comm_, dy, x, dx, {gamma_, beta_}, state(), options_.norm, of,
                                    {gamma_grad_, beta_grad_}, workspace_);
  }
  /// What the latest forward pass left for its backward pass.
  [[nodiscard]] power_norm_saved const& saved() const noexcept { return saved_; }

  /// Waits for the exchanges in flight. Throws what is wrong with them, on every rank that calls.
  void synchronize() { workspace_.synchronize(); }
  /// Whether there is something in flight.
  [[nodiscard]] bool in_flight() const noexcept { return workspace_.in_flight(); }

  /// The same on every rank, since evaluation exchanges nothing.
  void train(bool on = true) noexcept { training_ = on; }
  void eval() noexcept { training_ = false; }
  [[nodiscard]] bool is_training() const noexcept { return training_; }

  void zero_grad() {
    std::ranges::fill(gamma_grad_, from_double<P>(0));
    std::ranges::fill(beta_grad_, from_double<P>(0));
  }

  [[nodiscard]] std::int64_t channels() const noexcept { return workspace_.channels(); }
  [[nodiscard]] C const& comm() const noexcept { return comm_; }
  [[nodiscard]] power_norm_layer_options const& options() const noexcept { return options_; }

  /// `[C]` each; empty without affine parameters.
  [[nodiscard]] std::span<P> gamma() noexcept { return gamma_; }
  [[nodiscard]] std::span<P const> gamma() const noexcept { return gamma_; }
  [[nodiscard]] std::span<P> beta() noexcept { return beta_; }
  [[nodiscard]] std::span<P const> beta() const noexcept { return beta_; }
  [[nodiscard]] std::span<P> gamma_grad() noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P const> gamma_grad() const noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P> beta_grad() noexcept { return beta_grad_; }
  [[nodiscard]] std::span<P const> beta_grad() const noexcept { return beta_grad_; }

  /// The state, `[C]` each, and the number of steps it has seen. As `synchronize` first; what an
  /// earlier call returned shows the state of that moment only until the next pass.
  [[nodiscard]] std::span<P> running_phi() { return up_to_date().running_phi; }
  [[nodiscard]] std::span<P> ema_gz() { return up_to_date().ema_gz; }
  [[nodiscard]] std::int64_t& iters() { return up_to_date().iters; }

private:
  struct owned_state {
    std::vector<P> running_phi, ema_gz;
    std::int64_t iters = 0;
  };

  [[nodiscard]] power_norm_state<P> state() { return {state_->running_phi, state_->ema_gz, &state_->iters}; }
  [[nodiscard]] owned_state& up_to_date() {
    workspace_.synchronize();
    return *state_;
  }

  C comm_;
  [[no_unique_address]] E exec_;
  power_norm_layer_options options_;
  std::vector<P> gamma_, beta_, gamma_grad_, beta_grad_;
  std::unique_ptr<owned_state> state_; // exchanges in flight refer to it, wherever the layer is moved
  bool training_ = true;
  power_norm_saved saved_;
  power_norm_workspace<C, P> workspace_;
};

} // namespace syncnorm
