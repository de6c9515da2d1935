#pragma once

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/complex_second_order.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/batches_in_blocks.hpp>
#include <syncnorm/host/complex_double_backward.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/backward_steps.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/double_backward_buffers.hpp>
#include <syncnorm/ops/detail/double_backward_steps.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// A double backward pass, as `complex_batch_norm_double_backward` documents it. Ranks add up sums of 2·C channels, real and imaginary parts.
template <complex_component T>
class complex_double_backward final : public double_backward_steps {
  using number = std::complex<T>;

public:
  /// Of so many complex channels. Everything is borrowed, and checked.
  complex_double_backward(host::executor_ref exec, std::int64_t channels,
                          complex_double_backward_operands<T> const& operands, batch_norm_saved const& saved)
      : double_backward_steps{components_of(channel_span{0, channels}).length, saved}, exec_{exec}, numbers_{channels},
        in_{operands} {
    look_into(check_, [&] {
      check_saved(2);
      auto const batches = in_.x.size();
      check_count(in_.dy.size(), batches, "dy", true);
      check_count(in_.second.dx.size(), batches, "the gradient with respect to dx");
      check_count(in_.to_dy.size(), batches, "the gradient to dy");
      check_count(in_.to_x.size(), batches, "the gradient to x");
      for (std::size_t k = 0; k < batches && !check_.failed(); ++k) check_batch(k, batches);
      check_.own_count(check_.count_of(in_.x), saved.own_count);
      check_outputs_apart(check_, in_);
      check_complex_affine(check_, in_.affine, channels);
      check_.channel_values(in_.second.gamma_gradient, "the gradient with respect to that of gamma", channels);
      check_.channel_values(in_.second.gamma_imag_gradient,
                            "the gradient with respect to that of the imaginary part of gamma", channels);
      check_.channel_values(in_.second.beta_gradient, "the gradient with respect to that of beta", channels);
      check_.channel_values(in_.gradients.gamma, "the gradient of gamma", channels);
      check_.channel_values(in_.gradients.gamma_imag, "the gradient of the imaginary part of gamma", channels);
      check_gamma_gradients(check_, in_);
      check_masks<T>(check_, in_.masks, in_.x);
    });
  }

private:
  void check_batch(std::size_t k, std::size_t batches) {
    auto const& x = in_.x[k];
    check_.tensor(x, batch_name("x", k, batches), numbers_);
    check_.same_extents(in_.dy[k], batch_name("dy", k, batches), x);
    if (auto const u = of(in_.second.dx, k); u.is_given())
      check_.same_extents(u, batch_name("the gradient with respect to dx", k, batches), x);
    if (auto const to = of(in_.to_dy, k); to.is_given())
      check_.output(to, batch_name("the gradient to dy", k, batches), x);
    if (auto const to = of(in_.to_x, k); to.is_given())
      check_.output(to, batch_name("the gradient to x", k, batches), x);
  }

  [[nodiscard]] packet_header header() const override {
    auto own = make_header<T>(name, channels_, check_.count_of(in_.x), saved_->exchange, check_);
    name_complex<T>(own);
    name_complex_gamma(own, in_.affine);
    return own;
  }

  void local() override { local_by(exec_, {0, numbers_}); }
  void apply() override { apply_by(exec_, {0, numbers_}); }
  void run_alone() override {
    host::for_each_block(
        exec_, numbers_, in_.x, 3, [&](host::executor_ref exec, std::int64_t first, std::int64_t length) {
          channel_span const range{first, length};
          local_by(exec, range);
          for (std::size_t v = 0; v < buffers_type::rows; ++v) {
            auto const part = components_of(range);
            std::ranges::copy(part_of(own(static_cast<row>(v)), part), part_of(all(static_cast<row>(v)), part).begin());
          }
          apply_by(exec, range);
        });
  }

  void local_by(host::executor_ref exec, channel_span range) const {
    auto const part = components_of(range);
    auto const sums_in = [&](std::vector<double>& sums) -> host::complex_double_backward_sums {
      auto const in = [&](row which) { return part_of(buffers_type::of(sums, which), part); };
      return {in(row::g), in(row::g_xmu), in(row::u), in(row::u_xmu), in(row::u_g)};
    };
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      bool const first = k == 0;
      host::double_backward_reduce_complex(exec, operands(k, range),
                                           part_of(std::span<double const>{saved_->mean}, part),
                                           sums_in(first ? buffers_->own : buffers_->more));
      if (first) continue;
      for (auto const which : {row::g, row::g_xmu, row::u, row::u_xmu, row::u_g}) {
        auto const sums = part_of(own(which), part), more = part_of(buffers_type::of(buffers_->more, which), part);
        std::ranges::transform(sums, more, sums.begin(), std::plus<>{});
      }
    }
    // The sums times conj(a), which is each rank's own.
    for (auto c = static_cast<std::size_t>(range.first); c < static_cast<std::size_t>(range.first + range.length);
         ++c) {
      auto const turned = second_gamma(c).conjugate();
      set(own(row::a_g), c, times_given(turned, at(own(row::g), c)));
      set(own(row::a_g_xmu), c, {times_given(turned, at(own(row::g_xmu), c)).re, 0});
    }
  }

  void apply_by(host::executor_ref exec, channel_span range) const {
    auto const mean = part_of(std::span<double const>{saved_->mean}, components_of(range));
    auto const terms = [&](std::int64_t channel) {
      auto const c = static_cast<std::size_t>(range.first + channel);
      auto const gamma = complex_gamma_of(in_.affine, c);
      auto const b = in_.second.beta_gradient.empty() ? number{} : in_.second.beta_gradient[c];
      return make_complex_second_order_coefficients(saved_->inv_std[2 * c], {gamma.real(), gamma.imag()},
                                                    second_gamma(c), {b.real(), b.imag()}, sums_of(c),
                                                    saved_->normalized());
    };
    for (auto k = in_.x.size(); k-- > 0;)
      host::double_backward_elemt_complex(exec, operands(k, range), mean, terms, host::stores_for(in_.x[k]));
  }

  void commit() override {
    for (std::size_t c = 0; c < own(row::u).size() / 2; ++c) {
      double const r = saved_->inv_std[2 * c];
      auto const more = complex_second_order_gamma(r, at(own(row::u), c), r * at(own(row::u_xmu), c).re,
                                                   at(own(row::u_g), c), sums_of(c), saved_->normalized());
      if (!in_.gradients.gamma.empty()) add_rounded(in_.gradients.gamma[c], more.re);
      if (!in_.gradients.gamma_imag.empty()) add_rounded(in_.gradients.gamma_imag[c], more.im);
    }
  }

  [[nodiscard]] host::complex_second_order_operands<T> operands(std::size_t k, channel_span range) const {
    auto const part = [&](auto const& view) { return view.is_given() ? part_of(view, range) : view; };
    return {part(in_.dy[k]),       part(in_.x[k]),   part(of(in_.second.dx, k)),   part(of(in_.to_dy, k)),
            part(of(in_.to_x, k)), of(in_.masks, k), has_complex_gamma(in_.affine)};
  }

  [[nodiscard]] static complex_value at(std::span<double const> components, std::size_t c) {
    return {components[2 * c], components[2 * c + 1]};
  }
  static void set(std::span<double> components, std::size_t c, complex_value value) {
    components[2 * c] = value.re, components[2 * c + 1] = value.im;
  }
  /// The gradient with respect to that of gamma.
  [[nodiscard]] complex_value second_gamma(std::size_t c) const {
    auto const value = [&](std::span<T const> of) { return of.empty() ? 0.0 : static_cast<double>(of[c]); };
    return {value(in_.second.gamma_gradient), value(in_.second.gamma_imag_gradient)};
  }
  /// Of all ranks.
  [[nodiscard]] complex_second_order_sums sums_of(std::size_t c) const {
    auto const sum = [&](row which) { return at(all(which), c); };
    double const r = saved_->inv_std[2 * c];
    return {sum(row::g),   r * sum(row::g_xmu),     sum(row::u), r * sum(row::u_xmu).re, sum(row::u_g),
            sum(row::a_g), r * sum(row::a_g_xmu).re};
  }

  host::executor_ref exec_;
  std::int64_t numbers_; ///< complex channels
  complex_double_backward_operands<T> in_;
};

} // namespace syncnorm::detail
