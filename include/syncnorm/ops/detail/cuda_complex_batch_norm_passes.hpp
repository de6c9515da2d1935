#pragma once

#include <complex>
#include <cstddef>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/complex_kernels.hpp>
#include <syncnorm/cuda/complex_operands.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/cuda_statistics_pass.hpp>

// Workspaces and what forward passes save have 2·C channels, real and imaginary parts.
namespace syncnorm::cuda::detail {

using syncnorm::detail::complex_backward_operands;
using syncnorm::detail::complex_forward_operands;

template <class P>
[[nodiscard]] channel_values component_values_of(std::span<std::complex<P> const> numbers) {
  return values_of(syncnorm::detail::components_of(numbers));
}
template <class P>
[[nodiscard]] channel_outputs component_outputs_of(std::span<std::complex<P>> numbers) {
  return outputs_of(syncnorm::detail::components_of(numbers));
}
template <class P>
[[nodiscard]] complex_affine_values values_of(complex_affine_parameters<P> const& affine) {
  return {values_of(affine.gamma), component_values_of(affine.beta), values_of(affine.gamma_imag)};
}

/// A tensor of no elements.
template <class T>
[[nodiscard]] tensor_view<std::complex<T>> empty_of(batch_norm_workspace const& workspace) {
  auto none = workspace.empty<std::complex<T>>();
  none.channels /= 2;
  return none;
}

/// A forward pass over complex numbers by the kernels of `Kernels`.
template <class Kernels, complex_component T>
class complex_forward_pass final : public saving_pass {
  using kernels = complex_kernels_of<T, Kernels>;
  using number = std::complex<T>;

public:
  /// Borrows everything.
  complex_forward_pass(complex_forward_operands<T> const& in, batch_norm_options const& options,
                       batch_norm_saved& saved, batch_norm_workspace& workspace)
      : saving_pass{in.scope, options, saved, workspace, {}}, in_{in} {}

  void check(bool alone, cudaStream_t stream) override {
    auto const components = workspace_->channels(), channels = components / 2;
    auto const batches = in_.x.size();
    using syncnorm::detail::batch_name;
    check_.require(channels >= 0, [&] { return check_.text("the number of channels is negative: ", channels); });
    check_.place(stream);
    check_.saved(*saved_, components);
    check_.batches_of(in_.y.size(), batches, "micro-batches of y", false);
    check_.batches_of(in_.masks.size(), batches, "masks", true);
    bool masked = false;
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) {
      check_.input(in_.x[k], batch_name{"x", k, batches}, channels);
      check_.written(in_.y[k], batch_name{"y", k, batches}, in_.x[k]);
      check_.mask_of(mask(k).mask, in_.x[k], k, batches);
      masked |= static_cast<bool>(mask(k).mask);
    }
    syncnorm::detail::check_output_apart<number>(check_, batches, {"y", in_.y}, {{"x", in_.x}}, true);
    auto const count = check_.count_of(in_.x);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.gamma_imag, "the imaginary part of gamma", channels);
    check_.values(in_.affine.beta, "beta", channels);
    check_running(in_.running, channels);
    check_count(alone, masked ? 0 : count);
    header_ = syncnorm::detail::make_forward_header<T>(components, count, in_.affine, in_.running, options_, check_);
    syncnorm::detail::name_complex<T>(header_);
    syncnorm::detail::name_complex_gamma(header_, in_.affine);

    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void announce(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    moments_of(empty_of<T>(*workspace_), {}, header, own, stream);
  }
  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    if (in_.x.empty()) return announce(header, own, stream);
    add_packets(packets(), in_.x.size(), own,
                [&](std::size_t k, packet_place const& at) { moments_of(in_.x[k], mask(k).mask, header, at, stream); });
  }

  void agree_on_group(gathered_headers const& all, fault_report const& report, cudaStream_t stream) override {
    kernels::agree_on_group(all, true, report, stream);
  }
  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const&, fault_report const& report,
             cudaStream_t stream) override {
    save();
    for_each_batch(
        [&](tensor_view<number const> const& x, tensor_view<number> const& y, batch_norm_mask const& done, bool first) {
          // What outlives the pass is written once.
          kernels::normalize(x, y, values_of(in_.affine), done, options_, all, saved_->statistics(),
                             first ? running() : running_outputs{}, first ? report : fault_report{}, workspace_->work(),
                             workspace_->limits(), stream);
        });
  }

  void run_alone(cudaStream_t stream) override {
    packet_place const own{packets().own().data()};
    if (!constant()) {
      local(header(), own, stream);
      return apply(own_packet(own), own, workspace_->report(), stream);
    }
    save();
    auto const by = running();
    for_each_batch(
        [&](tensor_view<number const> const& x, tensor_view<number> const& y, batch_norm_mask const& done, bool) {
          kernels::normalize_constant(x, y, values_of(in_.affine), done, options_, by.mean, by.var,
                                      saved_->statistics(), workspace_->limits(), stream);
        });
  }

private:
  [[nodiscard]] batch_norm_mask mask(std::size_t k) const { return of_batch(in_.masks, k); }
  [[nodiscard]] running_outputs running() const {
    return {component_outputs_of(in_.running.mean), outputs_of(in_.running.var), in_.running.num_batches_tracked};
  }
  /// f(x, y, mask, whether it is the first), once at least.
  template <class F>
  void for_each_batch(F const& f) const {
    if (in_.x.empty()) f(empty_of<T>(*workspace_), empty_of<T>(*workspace_), {}, true);
    for (std::size_t k = 0; k < in_.x.size(); ++k) f(in_.x[k], in_.y[k], mask(k), k == 0);
  }
  void moments_of(tensor_view<number const> const& x, mask_view of, syncnorm::detail::packet_header const& header,
                  packet_place const& at, cudaStream_t stream) const {
    kernels::local_moments(x, of, header, at, workspace_->work(), workspace_->limits(), stream);
  }

  complex_forward_operands<T> in_;
};

/// A backward pass over complex numbers by the kernels of `Kernels`.
template <class Kernels, complex_component T>
class complex_backward_pass final : public following_pass {
  using kernels = complex_kernels_of<T, Kernels>;
  using number = std::complex<T>;

public:
  /// Borrows everything.
  complex_backward_pass(complex_backward_operands<T> const& in, bool exchange, batch_norm_saved const& saved,
                        batch_norm_workspace& workspace)
      : following_pass{exchange, saved, workspace, {}}, in_{in} {}

  void check(bool, cudaStream_t stream) override {
    auto const components = workspace_->channels(), channels = components / 2;
    auto const batches = in_.x.size();
    using syncnorm::detail::batch_name;
    check_forward(stream);
    check_.batches_of(in_.dy.size(), batches, "micro-batches of dy", false);
    check_.batches_of(in_.dx.size(), batches, "micro-batches of dx", true);
    check_.batches_of(in_.masks.size(), batches, "masks", true);
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) {
      auto const& x = in_.x[k];
      check_.input(x, batch_name{"x", k, batches}, channels);
      check_.input_like(in_.dy[k], batch_name{"dy", k, batches}, x);
      if (dx(k).is_given()) check_.written(dx(k), batch_name{"dx", k, batches}, x);
      check_.mask_of(mask(k).mask, x, k, batches);
    }
    syncnorm::detail::check_output_apart<number>(check_, batches, {"dx", in_.dx}, {{"dy", in_.dy}, {"x", in_.x}}, true);
    auto const count = check_.count_of(in_.x);
    check_.own_count(count, saved_->own_count);
    check_.values(in_.affine.gamma, "gamma", channels);
    check_.values(in_.affine.gamma_imag, "the imaginary part of gamma", channels);
    check_.values(in_.gradients.gamma, "the gradient of gamma", channels);
    check_.values(in_.gradients.gamma_imag, "the gradient of the imaginary part of gamma", channels);
    check_.values(in_.gradients.beta, "the gradient of beta", channels);
    header_ = syncnorm::detail::make_header<T>(name(), components, count, saved_->exchange, check_);
    syncnorm::detail::name_complex<T>(header_);
    syncnorm::detail::name_complex_gamma(header_, in_.affine);
    // Kernels get nothing of a call that is wrong.
    if (check_.failed()) in_ = {};
  }

  void announce(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    tensor_view<number const> const none = empty_of<T>(*workspace_);
    sums_of(none, none, {}, header, own, stream);
  }
  void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) override {
    if (in_.x.empty()) return announce(header, own, stream);
    add_packets(packets(), in_.x.size(), own, [&](std::size_t k, packet_place const& at) {
      sums_of(in_.dy[k], in_.x[k], mask(k), header, at, stream);
    });
  }

  void agree_on_group(gathered_headers const& all, fault_report const& report, cudaStream_t stream) override {
    kernels::agree_on_group(all, false, report, stream);
  }
  void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) override {
    kernels::accept_sums(of, report, stream);
  }
  void apply(gathered_packets const& all, packet_place const& own, fault_report const& report,
             cudaStream_t stream) override {
    auto const gradient = [&](tensor_view<number const> const& dy, tensor_view<number const> const& x,
                              tensor_view<number> const& to, batch_norm_mask const& done, bool first) {
      // What outlives the pass is written once.
      kernels::backward_elemt(dy, x, to, values_of(in_.affine), done, saved_->statistics(), all, own,
                              first ? outputs() : complex_affine_outputs{}, first ? report : fault_report{},
                              workspace_->limits(), stream);
    };
    tensor_view<number const> const none = empty_of<T>(*workspace_);
    if (in_.x.empty()) gradient(none, none, {}, {}, true);
    for (std::size_t k = 0; k < in_.x.size(); ++k) gradient(in_.dy[k], in_.x[k], dx(k), mask(k), k == 0);
  }

  void run_alone(cudaStream_t stream) override {
    auto const& wanted = in_.gradients;
    if (saved_->scope == statistics_scope::constant && wanted.gamma.empty() && wanted.gamma_imag.empty() &&
        wanted.beta.empty())
      return apply({}, {}, {}, stream); // dx depends on no sums
    packet_place const own{packets().own().data()};
    local(header(), own, stream);
    apply(own_packet(own), own, workspace_->report(), stream);
  }

private:
  [[nodiscard]] tensor_view<number> dx(std::size_t k) const { return of_batch(in_.dx, k); }
  [[nodiscard]] batch_norm_mask mask(std::size_t k) const { return of_batch(in_.masks, k); }
  void sums_of(tensor_view<number const> const& dy, tensor_view<number const> const& x, batch_norm_mask const& done,
               syncnorm::detail::packet_header const& header, packet_place const& at, cudaStream_t stream) const {
    kernels::backward_reduce(dy, x, syncnorm::detail::has_complex_gamma(in_.affine), done, saved_->statistics(), header,
                             at, workspace_->work(), workspace_->limits(), stream);
  }
  [[nodiscard]] complex_affine_outputs outputs() const {
    return {outputs_of(in_.gradients.gamma), component_outputs_of(in_.gradients.beta),
            outputs_of(in_.gradients.gamma_imag)};
  }

  complex_backward_operands<T> in_;
};

template <class Kernels, complex_component T>
class planned_complex_forward final : public planned_pass {
public:
  planned_complex_forward(complex_forward_operands<T> const& in, batch_norm_options const& options,
                          batch_norm_saved& saved, batch_norm_workspace& workspace)
      : x_{copy_of(in.x)}, y_{copy_of(in.y)}, masks_{copy_of(in.masks)},
        steps_{{x_, y_, in.affine, in.running, in.scope, masks_}, options, saved, workspace} {}
  groupable_pass& steps() override { return steps_; }

private:
  std::vector<tensor_view<std::complex<T> const>> x_;
  std::vector<tensor_view<std::complex<T>>> y_;
  std::vector<batch_norm_mask> masks_;
  complex_forward_pass<Kernels, T> steps_;
};

template <class Kernels, complex_component T>
class planned_complex_backward final : public planned_pass {
public:
  planned_complex_backward(complex_backward_operands<T> const& in, bool exchange, batch_norm_saved const& saved,
                           batch_norm_workspace& workspace)
      : dy_{copy_of(in.dy)}, x_{copy_of(in.x)}, dx_{copy_of(in.dx)}, masks_{copy_of(in.masks)},
        steps_{{dy_, x_, dx_, in.affine, in.gradients, masks_}, exchange, saved, workspace} {}
  groupable_pass& steps() override { return steps_; }

private:
  std::vector<tensor_view<std::complex<T> const>> dy_, x_;
  std::vector<tensor_view<std::complex<T>>> dx_;
  std::vector<batch_norm_mask> masks_;
  complex_backward_pass<Kernels, T> steps_;
};

} // namespace syncnorm::cuda::detail
