#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/channel_moments.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/host/complex_components.hpp>
#include <syncnorm/host/complex_numbers.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/complex_steps.hpp>
#include <syncnorm/ops/detail/forward_steps.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/pass_tensors.hpp>

namespace syncnorm::detail {

/// Says in `check` what is wrong with x and y.
template <complex_component T>
void check_complex_tensors(call_check& check, complex_batches<T> x, complex_outputs<T> y, std::int64_t channels) {
  check_forward_tensors<std::complex<T>>(check, x, y, channels);
  check_output_apart<std::complex<T>>(check, x.size(), {"y", y}, {{"x", x}}, true);
}

/// Normalizes a range of complex channels number by number.
template <complex_component T>
void normalize_by_numbers(host::executor_ref exec, channel_span range, complex_forward_operands<T> const& in,
                          batch_norm_saved const& saved, complex_masks<T> const& masks) {
  auto const terms = [&](std::int64_t channel) {
    auto const c = static_cast<std::size_t>(range.first + channel);
    auto const beta = in.affine.beta.empty() ? std::complex<double>{} : std::complex<double>{in.affine.beta[c]};
    return host::make_complex_normalize_coefficients<T>(number_at(saved.mean, c), saved.inv_std[2 * c],
                                                        complex_gamma_of(in.affine, c), beta);
  };
  for (auto k = in.x.size(); k-- > 0;)
    host::normalize_complex<T>(exec, part_of(in.x[k], range), part_of(in.y[k], range), terms,
                               has_complex_gamma(in.affine), masks.given(k), host::stores_for(in.y[k]));
}

/// Normalizes a range of complex channels `by_numbers`, or of those whose components follow each other, or one of them.
template <complex_component T>
void normalize_complex(host::executor_ref exec, channel_span range, complex_forward_operands<T> const& in,
                       batch_norm_saved const& saved, affine_of_components<T> const& affine,
                       complex_masks<T> const& masks, bool by_numbers) {
  if (by_numbers) return normalize_by_numbers<T>(exec, range, in, saved, masks);
  auto const components = components_of(range);
  auto const mean = part_of(std::span{saved.mean}, components), inv_std = part_of(std::span{saved.inv_std}, components);
  for (auto k = in.x.size(); k-- > 0;) // backwards: what was read last is the likeliest to be in the cache
    host::normalize(exec, host::components_of(part_of(in.x[k], range)), host::components_of(part_of(in.y[k], range)),
                    mean, inv_std, affine.from(components.first), masks[k], host::stores_for(in.y[k]));
}

/// The steps of a forward pass over complex numbers in training.
template <complex_component T>
class complex_forward_steps final : public complex_steps {
public:
  static constexpr std::string_view name = "batch_norm forward";

  /// Of so many complex channels. Everything is borrowed, and checked.
  complex_forward_steps(host::executor_ref exec, std::int64_t channels, complex_forward_operands<T> const& operands,
                        batch_norm_options const& options, batch_norm_saved& saved, pass_buffers& buffers)
      : complex_steps{exec, channels}, in_{operands}, options_{options}, saved_{&saved}, buffers_{&buffers} {
    look_into(check_, [&] {
      check_.require(channels >= 0, [&] { return check_.text("the number of channels is negative: ", channels); });
      check_complex_tensors<T>(check_, in_.x, in_.y, channels);
      check_complex_affine(check_, in_.affine, channels);
      check_.options(options, in_.running, channels);
      check_.batches_tracked(options, in_.running.num_batches_tracked);
      masks_.emplace(check_, in_.masks, in_.x);
      affine_.emplace(check_, in_.affine);
      follow_ = all_follow(in_.x) && all_follow(in_.y);
      by_numbers_ = goes_by_numbers(in_.affine, in_.x, follow_);
      if (!collective()) check_.require(count() != 1, [] { return one_value_fault(false); });
    });
  }

  [[nodiscard]] merge_rule rule() const override { return merge_rule::moments; }
  [[nodiscard]] bool collective() const override { return in_.scope == statistics_scope::all_ranks; }

  [[nodiscard]] packet_header header() const override {
    auto own = make_forward_header<T>(channels(), count(), in_.affine, in_.running, options_, check_);
    name_batches_averaged(own, in_.running.num_batches_tracked, check_);
    name_complex<T>(own);
    name_complex_gamma(own, in_.affine);
    return own;
  }

  void accept(exchange_summary const& all) override {
    require_several(name, all.count);
    start_saved(*saved_, channels(), in_.scope, options_, check_.count_of(in_.x), all);
    buffers_->first.assign(saved_->mean.size(), 0.0);
  }

  [[nodiscard]] std::array<std::span<double>, 2> totals(channel_span part) override {
    return {part_of(std::span{saved_->mean}, part), part_of(std::span{buffers_->first}, part)};
  }

  void commit(channel_span part, std::span<double const>, std::span<double const>) override {
    if (part.first + part.length != channels()) return; // the counter counts a pass once, so the last span takes all
    auto const numbers = static_cast<std::size_t>(channels_);
    std::span const m2{buffers_->first};
    for (std::size_t c = 0; c < numbers; ++c) m2[c] = m2[2 * c];
    update_running_statistics<T>({components_of(in_.running.mean), in_.running.var, in_.running.num_batches_tracked},
                                 options_, *saved_, m2.first(numbers));
  }

  [[nodiscard]] batch_norm_saved const* saves_to() const override { return saved_; }
  void fail() override { forget(*saved_, in_.scope, options_.exchange); }

  void require_valid() const override {
    throw_fault(name, check_);
    require_several(name, count());
  }
  void run_alone() override {
    accept({count()});
    run_in_blocks<T>(in_.x, 1);
  }

private:
  [[nodiscard]] std::int64_t count() const {
    std::int64_t all = 0;
    if (check_.failed()) return all;
    for (std::size_t k = 0; k < in_.x.size(); ++k) all += (*masks_)[k].count(in_.x[k]);
    return all;
  }

  void local_by(host::executor_ref exec, channel_span range, std::span<double> mean,
                std::span<double> m2) const override {
    std::ranges::fill(mean, 0.0);
    std::ranges::fill(m2, 0.0);
    batch_values more{mean.size()};
    std::int64_t merged = 0;
    bool const short_rows = !follow_ && has_short_rows<T>(in_.x);
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      std::int64_t const counted = (*masks_)[k].count(in_.x[k]);
      if (short_rows)
        host::complex_moments(exec, part_of(in_.x[k], range), masks_->given(k).mask, counted, more.first(),
                              more.second());
      else
        for_each_range(exec, range, follow_, [&](host::executor_ref of_part, channel_span part) {
          auto const within = components_of(channel_span{part.first - range.first, part.length});
          host::local_moments(of_part, host::components_of(part_of(in_.x[k], part)), (*masks_)[k],
                              part_of(more.first(), within), part_of(more.second(), within));
        });
      merge_channels(merged, mean, m2, counted, more.first(), more.second());
      merged += counted;
    }
  }

  void apply_by(host::executor_ref exec, channel_span range) override {
    auto const components = components_of(range);
    auto const m2 = part_of(std::span{buffers_->first}, components),
               inv_std = part_of(std::span{saved_->inv_std}, components);
    pair_up(m2); // E|x − mean|² is the variance of both
    finish_statistics(m2, saved_->normalized(), options_.eps, inv_std);
    normalize_complex<T>(exec, range, in_, *saved_, *affine_, *masks_, by_numbers_);
  }

  complex_forward_operands<T> in_;
  batch_norm_options options_;
  batch_norm_saved* saved_;
  pass_buffers* buffers_;
  std::optional<complex_masks<T>> masks_;
  std::optional<affine_of_components<T>> affine_;
};

} // namespace syncnorm::detail
