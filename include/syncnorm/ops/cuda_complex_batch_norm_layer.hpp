#pragma once

#include <complex>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_kernels.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_complex_batch_norm_double_backward.hpp>
#include <syncnorm/ops/detail/cuda_complex_batch_norm_passes.hpp>
#include <syncnorm/ops/detail/cuda_layer.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>

namespace syncnorm::cuda {

/// A batch normalization layer of complex numbers, `std::complex<T>`, on a GPU: what `syncnorm::complex_batch_norm` computes on the host, on a
/// stream, and with the collectives and errors of `basic_batch_norm`. It owns the parameters (gamma = 1, beta = 0), their gradients, the
/// running statistics (mean 0, var 1) and their counter, in memory of the device that was current at its making. A pass of one rank is
/// two launches.
template <complex_component T, communicator C, class Kernels>
class basic_complex_batch_norm : public detail::device_layer<C> {
  using base = detail::device_layer<C>;

public:
  using value_type = std::complex<T>;
  using input = tensor_view<value_type const>;
  using output = tensor_view<value_type>;

  /// A complex `gamma` turns the phases of numbers, too. Local; checks nothing but that memory can be had: cuda_error.
  explicit basic_complex_batch_norm(C comm, std::int64_t channels, batch_norm_layer_options const& options = {},
                                    gamma_numbers gamma = gamma_numbers::real)
      : base{std::move(comm), channels, 2 * channels, options, current_limits()} {
    base::allocate([&](detail::memory_cutter& cutter) { cut(cutter, gamma == gamma_numbers::complex); });
    base::fill(gamma_, T{1});
    base::fill(running_var_, T{1});
  }

  /// As of `basic_batch_norm`.
  void prepare(cudaStream_t stream) {
    base::prepare_passes(
        stream, [] { complex_kernels_of<T, Kernels>::load_kernels(); },
        [&](detail::device_check& check) {
          check.options(options_.norm, running(), channels_);
          auto own =
              syncnorm::detail::make_forward_header<T>(2 * channels_, 0, affine(), running(), options_.norm, check);
          syncnorm::detail::name_complex<T>(own);
          syncnorm::detail::name_complex_gamma(own, affine());
          return own;
        });
  }

  /// y = complex_batch_norm(x), `[N, C, S]` in device memory; as on the host. `mask`: of the positions that count.
  void forward(input x, output y, batch_norm_mask const& mask, cudaStream_t stream) {
    forward({&x, 1}, {&y, 1}, {&mask, 1}, stream);
  }
  void forward(input x, output y, cudaStream_t stream) { forward(x, y, {}, stream); }
  /// The same of K micro-batches by one statistic, with one exchange. Masks: none, or one for each.
  void forward(std::span<input const> x, std::span<output const> y, std::span<batch_norm_mask const> masks,
               cudaStream_t stream) {
    detail::complex_forward_pass<Kernels, T> pass{forward_operands(x, y, masks), options_.norm, saved_, workspace_};
    detail::run_pass(comm_, pass, stream);
  }

  /// dx for the latest forward pass, whose x and mask these have to be; adds to the gradients of gamma and beta. A default `dx`: not
  /// needed. As on the host.
  void backward(input x, input dy, output dx, batch_norm_mask const& mask, batch_norm_backward_options const& options,
                cudaStream_t stream) {
    backward({&x, 1}, {&dy, 1}, {&dx, 1}, {&mask, 1}, options, stream);
  }
  void backward(input x, input dy, output dx, cudaStream_t stream) { backward(x, dy, dx, {}, {}, stream); }
  /// The same of the K micro-batches of the latest forward pass. No dx: not needed.
  void backward(std::span<input const> x, std::span<input const> dy, std::span<output const> dx,
                std::span<batch_norm_mask const> masks, batch_norm_backward_options const& options,
                cudaStream_t stream) {
    detail::complex_backward_pass<Kernels, T> pass{
        {dy, x, dx, affine(), gradients(), masks}, options.exchange, saved_, workspace_};
    detail::run_pass(comm_, pass, stream);
  }

  /// The gradients of the latest backward pass, whose x, dy and mask these have to be; adds to the gradient of gamma. As
  /// `complex_batch_norm_double_backward` on the host. The first one allocates, unless `reserve_double_backward` has.
  void double_backward(complex_second_order<T> const& second, input x, input dy, output to_dy, output to_x,
                       batch_norm_mask const& mask, batch_norm_backward_options const& options, cudaStream_t stream) {
    double_backward(second, {&x, 1}, {&dy, 1}, {&to_dy, 1}, {&to_x, 1}, {&mask, 1}, options, stream);
  }
  /// The same of K micro-batches. No to_dy or to_x: not needed.
  void double_backward(complex_second_order<T> const& second, std::span<input const> x, std::span<input const> dy,
                       std::span<output const> to_dy, std::span<output const> to_x,
                       std::span<batch_norm_mask const> masks, batch_norm_backward_options const& options,
                       cudaStream_t stream) {
    detail::complex_double_backward_pass<Kernels, T> pass{
        {dy, x, second, affine(), to_dy, to_x, gradients(), masks}, options.exchange, saved_, workspace_};
    detail::run_pass(comm_, pass, stream);
  }
  /// As of `basic_batch_norm`, seven numbers a component.
  void reserve_double_backward() {
    base::reserve_double_backward([] { complex_kernels_of<T, Kernels>::load_double_backward_kernels(); });
  }

  /// `forward` and `backward` up to the exchange; as of `basic_batch_norm`.
  [[nodiscard]] pending_passes begin_forward(input x, output y, batch_norm_mask const& mask, cudaStream_t stream) {
    return base::begin(plan_forward(x, y, mask), stream);
  }
  [[nodiscard]] pending_passes begin_backward(input x, input dy, output dx, batch_norm_mask const& mask,
                                              batch_norm_backward_options const& options, cudaStream_t stream) {
    return base::begin(plan_backward(x, dy, dx, mask, options), stream);
  }

  /// `forward` and `backward`, described for a `batch_norm_group`, in which layers of real and of complex numbers may be. The layer must
  /// stay where it is until the pass is finished.
  [[nodiscard]] batch_norm_pass plan_forward(input x, output y, batch_norm_mask const& mask = {}) {
    return plan_forward({&x, 1}, {&y, 1}, {&mask, 1});
  }
  [[nodiscard]] batch_norm_pass plan_forward(std::span<input const> x, std::span<output const> y,
                                             std::span<batch_norm_mask const> masks = {}) {
    return batch_norm_pass{std::make_unique<detail::planned_complex_forward<Kernels, T>>(
        forward_operands(x, y, masks), options_.norm, saved_, workspace_)};
  }
  [[nodiscard]] batch_norm_pass plan_backward(input x, input dy, output dx, batch_norm_mask const& mask = {},
                                              batch_norm_backward_options const& options = {}) {
    return plan_backward({&x, 1}, {&dy, 1}, {&dx, 1}, {&mask, 1}, options);
  }
  [[nodiscard]] batch_norm_pass plan_backward(std::span<input const> x, std::span<input const> dy,
                                              std::span<output const> dx, std::span<batch_norm_mask const> masks = {},
                                              batch_norm_backward_options const& options = {}) {
    detail::complex_backward_operands<T> const in{dy, x, dx, affine(), gradients(), masks};
    return batch_norm_pass{
        std::make_unique<detail::planned_complex_backward<Kernels, T>>(in, options.exchange, saved_, workspace_)};
  }

  /// The running statistics as they were at first: mean 0, var 1, no batches tracked. Local; the same on every rank. Waits for the
  /// stream; not for one that is being captured.
  void reset_running_stats(cudaStream_t stream) {
    detail::device_scope const there{workspace_.device()};
    batch_norm_workspace::wait(comm_, stream);
    base::fill(running_mean_, value_type{0});
    base::fill(running_var_, T{1});
    base::reset_counter();
  }

  void zero_grad(cudaStream_t stream) {
    base::zero(gamma_grad_, stream);
    base::zero(gamma_imag_grad_, stream);
    base::zero(beta_grad_, stream);
  }

  /// `[C]` each, in device memory; empty where the layer has no such parameters.
  [[nodiscard]] std::span<T> gamma() noexcept { return gamma_; }
  [[nodiscard]] std::span<T const> gamma() const noexcept { return gamma_; }
  [[nodiscard]] std::span<value_type> beta() noexcept { return beta_; }
  [[nodiscard]] std::span<value_type const> beta() const noexcept { return beta_; }
  [[nodiscard]] std::span<T> gamma_grad() noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<T const> gamma_grad() const noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<value_type> beta_grad() noexcept { return beta_grad_; }
  [[nodiscard]] std::span<value_type const> beta_grad() const noexcept { return beta_grad_; }
  /// `[C]` each, of a complex gamma, whose real part `gamma` is; else empty.
  [[nodiscard]] std::span<T> gamma_imag() noexcept { return gamma_imag_; }
  [[nodiscard]] std::span<T const> gamma_imag() const noexcept { return gamma_imag_; }
  [[nodiscard]] std::span<T> gamma_imag_grad() noexcept { return gamma_imag_grad_; }
  [[nodiscard]] std::span<T const> gamma_imag_grad() const noexcept { return gamma_imag_grad_; }
  /// `[C]` each, in device memory; empty without running statistics.
  [[nodiscard]] std::span<value_type> running_mean() noexcept { return running_mean_; }
  [[nodiscard]] std::span<value_type const> running_mean() const noexcept { return running_mean_; }
  [[nodiscard]] std::span<T> running_var() noexcept { return running_var_; }
  [[nodiscard]] std::span<T const> running_var() const noexcept { return running_var_; }

private:
  void cut(detail::memory_cutter& cutter, bool complex_gamma) {
    auto const c = base::channel_count();
    auto const take = [&]<class P>(std::span<P>& values, bool exists) {
      if (exists) values = {cutter.take<P>(c), c};
    };
    take(gamma_, base::has_gamma());
    take(gamma_grad_, base::has_gamma());
    take(gamma_imag_, base::has_gamma() && complex_gamma);
    take(gamma_imag_grad_, base::has_gamma() && complex_gamma);
    take(beta_, base::has_beta());
    take(beta_grad_, base::has_beta());
    take(running_mean_, options_.track_running_stats);
    take(running_var_, options_.track_running_stats);
  }

  [[nodiscard]] detail::complex_forward_operands<T>
  forward_operands(std::span<input const> x, std::span<output const> y, std::span<batch_norm_mask const> masks) const {
    return {x, y, affine(), running(), base::scope_of_forward(), masks};
  }
  [[nodiscard]] complex_affine_parameters<T> affine() const { return {gamma_, beta_, gamma_imag_}; }
  [[nodiscard]] complex_affine_gradients<T> gradients() const { return {gamma_grad_, beta_grad_, gamma_imag_grad_}; }
  [[nodiscard]] complex_running_statistics<T> running() const {
    if (!options_.track_running_stats) return {};
    return {running_mean_, running_var_, num_batches_tracked_};
  }

  using base::comm_, base::options_, base::channels_, base::num_batches_tracked_, base::saved_, base::workspace_;
  std::span<T> gamma_, gamma_imag_, gamma_grad_, gamma_imag_grad_, running_var_;
  std::span<value_type> beta_, beta_grad_, running_mean_;
};

} // namespace syncnorm::cuda
