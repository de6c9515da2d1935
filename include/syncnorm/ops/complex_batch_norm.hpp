#pragma once

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/complex_batch_norm_double_backward.hpp>
#include <syncnorm/ops/complex_batch_norm_passes.hpp>
#include <syncnorm/ops/pending_passes.hpp>

namespace syncnorm {

/// A batch normalization layer of complex numbers, `std::complex<T>`, whose statistics span the ranks of `C`; as
/// `complex_batch_norm_forward` and `complex_batch_norm_backward`. It owns the parameters (gamma = 1, beta = 0), their gradients, the
/// running statistics (mean 0, var 1) and what its latest forward pass saved. `batch_norm` of real numbers says what is wrong, when, and
/// on which ranks, and so does this, but that ranks which disagree on the number of channels name that of components, 2·C. Its epilogues are
/// not there but for masks, nor passes in place.
template <complex_component T, communicator C = self_communicator, host::executor E = host::serial_executor>
requires allgathers<C, std::byte>
class complex_batch_norm {
public:
  using value_type = std::complex<T>;
  using input = tensor_view<value_type const>;
  using output = tensor_view<value_type>;

  /// A complex `gamma` turns the phases of numbers, too; its passes take up to twice as long.
  explicit complex_batch_norm(C comm, std::int64_t channels, batch_norm_layer_options const& options = {}, E exec = {},
                              gamma_numbers gamma = gamma_numbers::real)
      : comm_{std::move(comm)}, exec_{std::move(exec)}, options_{options}, channels_{channels},
        workspace_{detail::components_of(detail::channel_span{0, channels}).length} {
    auto const c = static_cast<std::size_t>(channels > 0 ? channels : 0);
    if (options.affine && options.parts != affine_parts::beta) {
      gamma_.assign(c, 1);
      gamma_grad_.assign(c, 0);
      if (gamma == gamma_numbers::complex) {
        gamma_imag_.assign(c, 0);
        gamma_imag_grad_.assign(c, 0);
      }
    }
    if (options.affine && options.parts != affine_parts::gamma) {
      beta_.assign(c, 0);
      beta_grad_.assign(c, 0);
    }
    if (options.track_running_stats) {
      running_mean_.assign(c, 0);
      running_var_.assign(c, 1);
    }
  }

  /// y = complex_batch_norm(x). `[N, C, S]`, y may be x unless a backward pass follows, which needs x. In training mode collective; in
  /// evaluation mode, and while the statistics are frozen, local, by the running statistics. `mask`: of the positions that count.
  void forward(input x, output y, batch_norm_mask const& mask = {}) { forward({&x, 1}, {&y, 1}, {&mask, 1}); }
  /// The same of K micro-batches by one statistic, with one exchange. Masks: none, or one for each.
  void forward(std::span<input const> x, std::span<output const> y, std::span<batch_norm_mask const> masks = {}) {
    if (by_batch())
      return complex_batch_norm_forward<T>(exec_, comm_, x, y, affine(), running(), options_.norm, saved_, workspace_,
                                           masks);
    detail::or_forget(saved_, statistics_scope::constant, options_.norm.exchange, [&] {
      auto const alone = plan_forward(x, y, masks);
      run_alone({&alone, 1});
    });
  }

  /// dx for the latest forward pass, whose x and mask these have to be; adds to the gradients of gamma and beta. A default `dx`: not
  /// needed. Collective if the forward pass was, and the options do not say otherwise.
  void backward(input x, input dy, output dx, batch_norm_mask const& mask = {},
                batch_norm_backward_options const& options = {}) {
    backward({&x, 1}, {&dy, 1}, {&dx, dx.is_given() ? 1U : 0U}, {&mask, 1}, options);
  }
  /// The same of the K micro-batches of the latest forward pass. No dx, or a default one: not needed.
  void backward(std::span<input const> x, std::span<input const> dy, std::span<output const> dx,
                std::span<batch_norm_mask const> masks = {}, batch_norm_backward_options const& options = {}) {
    complex_batch_norm_backward<T>(exec_, comm_, dy, x, dx, affine(), saved_, gradients(), options, workspace_, masks);
  }

  /// The gradients of the latest backward pass, whose x, dy and mask these have to be; adds to the gradient of gamma. As
  /// `complex_batch_norm_double_backward`.
  void double_backward(complex_second_order<T> const& second, input x, input dy, output to_dy, output to_x,
                       batch_norm_mask const& mask = {}, batch_norm_backward_options const& options = {}) {
    double_backward(second, {&x, 1}, {&dy, 1}, {&to_dy, 1}, {&to_x, 1}, {&mask, 1}, options);
  }
  /// The same of K micro-batches.
  void double_backward(complex_second_order<T> const& second, std::span<input const> x, std::span<input const> dy,
                       std::span<output const> to_dy, std::span<output const> to_x,
                       std::span<batch_norm_mask const> masks = {}, batch_norm_backward_options const& options = {}) {
    complex_batch_norm_double_backward<T>(exec_, comm_, second, dy, x, affine(), saved_, to_dy, to_x, gradients(),
                                          options, workspace_, masks);
  }

  /// `forward` and `backward` up to the exchange; `finish` of what is returned completes them.
  [[nodiscard]] pending_passes begin_forward(input x, output y, batch_norm_mask const& mask = {}) {
    return detail::or_forget(saved_, by_batch() ? statistics_scope::all_ranks : statistics_scope::constant,
                             options_.norm.exchange, [&] {
                               return begin_pass(comm_, plan_forward({&x, 1}, {&y, 1}, {&mask, 1}), workspace_);
                             });
  }
  [[nodiscard]] pending_passes begin_backward(input x, input dy, output dx, batch_norm_mask const& mask = {},
                                              batch_norm_backward_options const& options = {}) {
    return begin_pass(comm_, plan_backward(x, dy, dx, mask, options), workspace_);
  }

  /// `forward` and `backward`, described for a `batch_norm_group`, in which layers of real and of complex numbers may be. The layer must
  /// stay where it is until the pass is finished.
  [[nodiscard]] batch_norm_pass plan_forward(input x, output y, batch_norm_mask const& mask = {}) {
    return plan_forward({&x, 1}, {&y, 1}, {&mask, 1});
  }
  [[nodiscard]] batch_norm_pass plan_forward(std::span<input const> x, std::span<output const> y,
                                             std::span<batch_norm_mask const> masks = {}) {
    using detail::complex_forward_steps, detail::complex_inference_steps;
    detail::complex_forward_operands<T> in{x, y, affine(), running(), statistics_scope::all_ranks, masks};
    if (!by_batch() && options_.track_running_stats) return plan_by<complex_inference_steps<T>>(in);
    if (!by_batch()) in.scope = statistics_scope::this_rank;
    return plan_by<complex_forward_steps<T>>(in);
  }
  [[nodiscard]] batch_norm_pass plan_backward(input x, input dy, output dx, batch_norm_mask const& mask = {},
                                              batch_norm_backward_options const& options = {}) {
    return plan_backward({&x, 1}, {&dy, 1}, {&dx, dx.is_given() ? 1U : 0U}, {&mask, 1}, options);
  }
  [[nodiscard]] batch_norm_pass plan_backward(std::span<input const> x, std::span<input const> dy,
                                              std::span<output const> dx, std::span<batch_norm_mask const> masks = {},
                                              batch_norm_backward_options const& options = {}) {
    detail::complex_backward_operands<T> const in{dy, x, dx, affine(), gradients(), masks};
    return batch_norm_pass{
        std::make_unique<detail::planned_complex_backward<T>>(exec_, channels_, in, saved_, options.exchange)};
  }

  /// The same on every rank, since evaluation exchanges nothing.
  void train(bool on = true) noexcept { training_ = on; }
  void eval() noexcept { training_ = false; }
  [[nodiscard]] bool is_training() const noexcept { return training_; }

  /// As of `batch_norm`.
  void freeze_statistics(bool on = true) noexcept { frozen_ = on; }
  [[nodiscard]] bool has_frozen_statistics() const noexcept { return frozen_; }

  /// The running statistics as they were at first: mean 0, var 1, no batches tracked. Local; the same on every rank.
  void reset_running_stats() {
    std::ranges::fill(running_mean_, value_type{0});
    std::ranges::fill(running_var_, T{1});
    num_batches_tracked_ = 0;
  }

  void zero_grad() {
    std::ranges::fill(gamma_grad_, T{0});
    std::ranges::fill(gamma_imag_grad_, T{0});
    std::ranges::fill(beta_grad_, value_type{0});
  }

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }
  [[nodiscard]] C const& comm() const noexcept { return comm_; }
  [[nodiscard]] batch_norm_layer_options const& options() const noexcept { return options_; }
  /// Statistics of the latest forward pass, `[C, 2]`: of the real and of the imaginary part, which have one inv_std.
  [[nodiscard]] batch_norm_saved const& saved() const noexcept { return saved_; }

  /// `[C]` each; empty where the layer has no such parameters.
  [[nodiscard]] std::span<T> gamma() noexcept { return gamma_; }
  [[nodiscard]] std::span<T const> gamma() const noexcept { return gamma_; }
  [[nodiscard]] std::span<value_type> beta() noexcept { return beta_; }
  [[nodiscard]] std::span<value_type const> beta() const noexcept { return beta_; }
  [[nodiscard]] std::span<T> gamma_grad() noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<T const> gamma_grad() const noexcept { return gamma_grad_; }
  /// `[C]` each, of a complex gamma, whose real part `gamma` is; else empty.
  [[nodiscard]] std::span<T> gamma_imag() noexcept { return gamma_imag_; }
  [[nodiscard]] std::span<T const> gamma_imag() const noexcept { return gamma_imag_; }
  [[nodiscard]] std::span<T> gamma_imag_grad() noexcept { return gamma_imag_grad_; }
  [[nodiscard]] std::span<T const> gamma_imag_grad() const noexcept { return gamma_imag_grad_; }
  [[nodiscard]] std::span<value_type> beta_grad() noexcept { return beta_grad_; }
  [[nodiscard]] std::span<value_type const> beta_grad() const noexcept { return beta_grad_; }
  /// `[C]` each; empty without running statistics.
  [[nodiscard]] std::span<value_type> running_mean() noexcept { return running_mean_; }
  [[nodiscard]] std::span<value_type const> running_mean() const noexcept { return running_mean_; }
  [[nodiscard]] std::span<T> running_var() noexcept { return running_var_; }
  [[nodiscard]] std::span<T const> running_var() const noexcept { return running_var_; }
  [[nodiscard]] std::int64_t& num_batches_tracked() noexcept { return num_batches_tracked_; }
  [[nodiscard]] std::int64_t num_batches_tracked() const noexcept { return num_batches_tracked_; }

private:
  [[nodiscard]] bool by_batch() const noexcept { return training_ && !frozen_; }
  [[nodiscard]] complex_affine_parameters<T> affine() const { return {gamma_, beta_, gamma_imag_}; }
  [[nodiscard]] complex_affine_gradients<T> gradients() { return {gamma_grad_, beta_grad_, gamma_imag_grad_}; }
  [[nodiscard]] complex_running_statistics<T> running() {
    if (!options_.track_running_stats) return {};
    return {running_mean_, running_var_, &num_batches_tracked_};
  }
  template <class Steps>
  [[nodiscard]] batch_norm_pass plan_by(detail::complex_forward_operands<T> const& in) {
    return batch_norm_pass{
        std::make_unique<detail::planned_complex_forward<T, Steps>>(exec_, channels_, in, options_.norm, saved_)};
  }

  C comm_;
  [[no_unique_address]] E exec_;
  batch_norm_layer_options options_;
  std::int64_t channels_;
  std::vector<T> gamma_, gamma_imag_, gamma_grad_, gamma_imag_grad_, running_var_;
  std::vector<value_type> beta_, beta_grad_, running_mean_;
  std::int64_t num_batches_tracked_ = 0;
  bool training_ = true, frozen_ = false;
  batch_norm_saved saved_;
  batch_norm_workspace workspace_;
};

} // namespace syncnorm
