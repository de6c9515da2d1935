#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/host/complex_components.hpp>
#include <syncnorm/host/complex_numbers.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/backward_steps.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/complex_steps.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/pass_tensors.hpp>

namespace syncnorm::detail {

/// The steps of a backward pass over complex numbers.
template <complex_component T>
class complex_backward_steps final : public complex_steps {
public:
  static constexpr std::string_view name = "batch_norm backward";

  /// Everything is borrowed, and checked. `exchange` as in `batch_norm_backward_options`.
  complex_backward_steps(host::executor_ref exec, std::int64_t channels, complex_backward_operands<T> const& operands,
                         batch_norm_saved const& saved, bool exchange, pass_buffers& buffers)
      : complex_steps{exec, channels}, in_{operands}, saved_{&saved}, saved_passes_{saved.passes}, buffers_{&buffers},
        exchanges_{exchange && saved.scope == statistics_scope::all_ranks} {
    look_into(check_, [&] {
      check_.require(saved.mean.size() == static_cast<std::size_t>(2 * channels) &&
                         saved.inv_std.size() == saved.mean.size(),
                     [&] {
                       return check_.text("the saved statistics have ", saved.mean.size() / 2, " channels, expected ",
                                          channels, "; was there a forward pass?");
                     });
      check_backward_tensors<std::complex<T>>(check_, in_.dy, in_.x, in_.dx, channels, saved.own_count);
      check_output_apart<std::complex<T>>(check_, in_.x.size(), {"dx", in_.dx}, {{"dy", in_.dy}, {"x", in_.x}}, true);
      check_complex_affine<T>(check_, {in_.affine.gamma, {}, in_.affine.gamma_imag}, channels);
      check_.channel_values(in_.gradients.gamma, "the gradient of gamma", channels);
      check_.channel_values(in_.gradients.gamma_imag, "the gradient of the imaginary part of gamma", channels);
      check_.channel_values(in_.gradients.beta, "the gradient of beta", channels);
      check_.require(in_.gradients.gamma_imag.empty() || has_complex_gamma(in_.affine),
                     [] { return std::string{"gamma is real, but the gradient of its imaginary part is asked for"}; });
      masks_.emplace(check_, in_.masks, in_.x);
      affine_.emplace(check_, in_.affine);
      follow_ = all_follow(in_.x) && all_follow(in_.dy) && all_follow(in_.dx);
      by_numbers_ = goes_by_numbers(in_.affine, in_.x, follow_);
    });
  }

  [[nodiscard]] merge_rule rule() const override { return merge_rule::sums; }
  [[nodiscard]] bool collective() const override { return exchanges_; }

  [[nodiscard]] packet_header header() const override {
    auto own = make_header<T>(name, channels(), check_.count_of(in_.x), saved_->exchange, check_);
    name_complex<T>(own);
    name_complex_gamma(own, in_.affine);
    return own;
  }

  void accept(exchange_summary const&) override {
    if (saved_->passes != saved_passes_)
      throw invalid_argument_error{"batch_norm backward: the layer has had another forward pass since this one began"};
    buffers_->first.assign(static_cast<std::size_t>(channels()), 0.0);
    buffers_->second.assign(buffers_->first.size(), 0.0);
    paired_.assign(buffers_->first.size(), 0.0);
  }

  [[nodiscard]] std::array<std::span<double>, 2> totals(channel_span part) override {
    return {part_of(std::span{buffers_->first}, part), part_of(std::span{buffers_->second}, part)};
  }

  void commit(channel_span part, std::span<double const> sum_dy, std::span<double const> sum_dy_xmu) override {
    auto const numbers = complex_channels_of(part);
    auto const gamma = part_of(in_.gradients.gamma, numbers);
    auto const beta = components_of(part_of(in_.gradients.beta, numbers));
    auto const inv_std = part_of(std::span<double const>{saved_->inv_std}, part);
    bool const is_complex = has_complex_gamma(in_.affine);
    for (std::size_t c = 0; c < gamma.size(); ++c)
      add_rounded(gamma[c], inv_std[2 * c] * (sum_dy_xmu[2 * c] + (is_complex ? 0.0 : sum_dy_xmu[2 * c + 1])));
    auto const gamma_imag = part_of(in_.gradients.gamma_imag, numbers);
    for (std::size_t c = 0; c < gamma_imag.size(); ++c)
      add_rounded(gamma_imag[c], inv_std[2 * c] * sum_dy_xmu[2 * c + 1]);
    add_affine_gradients<T>({{}, beta}, inv_std, sum_dy, sum_dy_xmu);
  }

  void require_valid() const override { throw_fault(name, check_); }
  void run_alone() override {
    accept({});
    // By constant statistics dx depends on no sums.
    auto const& wanted = in_.gradients;
    if (saved_->count == 0 && wanted.gamma.empty() && wanted.gamma_imag.empty() && wanted.beta.empty())
      return apply({0, channels()});
    run_in_blocks<T>(in_.x, 2);
  }

private:
  /// Σ dy, and of Σ dy·(x − mean) what components have, in whatever parts; or with a complex gamma both parts of Σ dy·conj(x − mean).
  void local_by(host::executor_ref exec, channel_span range, std::span<double> sum_dy,
                std::span<double> sum_dy_xmu) const override {
    std::ranges::fill(sum_dy, 0.0);
    std::ranges::fill(sum_dy_xmu, 0.0);
    auto const components = components_of(range);
    auto const mean = part_of(std::span<double const>{saved_->mean}, components);
    batch_values more{sum_dy.size()};
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      auto const dy = part_of(in_.dy[k], range), x = part_of(in_.x[k], range);
      if (by_numbers_)
        host::backward_reduce_complex<T>(exec, dy, x, mean, masks_->given(k), more.first(), more.second());
      else
        host::backward_reduce(exec, host::components_of(dy), host::components_of(x), mean,
                              part_of(std::span<double const>{saved_->inv_std}, components),
                              affine_->from(components.first), (*masks_)[k], more.first(), more.second());
      for (std::size_t i = 0; i < sum_dy.size(); ++i) {
        sum_dy[i] += more.first()[i];
        sum_dy_xmu[i] += more.second()[i];
      }
    }
    if (!by_numbers_ || has_complex_gamma(in_.affine)) return;
    for (std::size_t i = 1; i < sum_dy_xmu.size(); i += 2) sum_dy_xmu[i] = 0; // of both, the real part has the sum
  }

  void apply_by(host::executor_ref exec, channel_span range) override {
    if (by_numbers_) return apply_by_numbers(exec, range);
    auto const components = components_of(range);
    auto const paired = part_of(std::span{paired_}, components);
    std::ranges::copy(part_of(std::span{buffers_->second}, components), paired.begin());
    pair_up(paired); // both depend on the variance
    for (auto k = in_.dx.size(); k-- > 0;) {
      if (!in_.dx[k].is_given()) continue;
      host::backward_elemt(
          exec, host::components_of(part_of(in_.dy[k], range)), host::components_of(part_of(in_.x[k], range)),
          host::components_of(part_of(in_.dx[k], range)), {},
          part_of(std::span<double const>{saved_->mean}, components),
          part_of(std::span<double const>{saved_->inv_std}, components), affine_->from(components.first),
          part_of(std::span<double const>{buffers_->first}, components), paired, saved_->normalized(), (*masks_)[k],
          host::stores_for(in_.dx[k]));
    }
  }

  void apply_by_numbers(host::executor_ref exec, channel_span range) {
    auto const count = saved_->normalized();
    bool const is_complex = has_complex_gamma(in_.affine);
    auto const terms = [&](std::int64_t channel) {
      auto const c = static_cast<std::size_t>(range.first + channel);
      auto const products = number_at(buffers_->second, c);
      return host::make_complex_backward_coefficients<T>(
          number_at(saved_->mean, c), saved_->inv_std[2 * c], complex_gamma_of(in_.affine, c),
          number_at(buffers_->first, c), is_complex ? products : products.real() + products.imag(), count);
    };
    for (auto k = in_.dx.size(); k-- > 0;) {
      if (!in_.dx[k].is_given()) continue;
      host::backward_elemt_complex<T>(exec, part_of(in_.dy[k], range), part_of(in_.x[k], range),
                                      part_of(in_.dx[k], range), terms, is_complex, count.n == 0, masks_->given(k),
                                      host::stores_for(in_.dx[k]));
    }
  }

  complex_backward_operands<T> in_;
  batch_norm_saved const* saved_;
  std::int64_t saved_passes_; ///< when the pass began
  pass_buffers* buffers_;
  bool exchanges_;
  std::optional<complex_masks<T>> masks_;
  std::optional<affine_of_components<T>> affine_;
  kept_vector<double> paired_; ///< of both components, the sums of dy·(x − mean) over all ranks
};

} // namespace syncnorm::detail
