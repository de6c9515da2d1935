#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_forward_steps.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// The steps of a forward pass over complex numbers by their running statistics, which takes part in no exchange.
template <complex_component T>
class complex_inference_steps final : public local_pass_steps {
public:
  static constexpr std::string_view name = "batch_norm inference";

  /// Of so many complex channels. Everything is borrowed, and checked.
  complex_inference_steps(host::executor_ref exec, std::int64_t channels, complex_forward_operands<T> const& operands,
                          batch_norm_options const& options, batch_norm_saved& saved, pass_buffers&)
      : exec_{exec}, channels_{channels}, in_{operands}, options_{options}, saved_{&saved} {
    look_into(check_, [&] {
      check_.require(channels >= 0, [&] { return check_.text("the number of channels is negative: ", channels); });
      check_complex_tensors<T>(check_, in_.x, in_.y, channels);
      check_complex_affine(check_, in_.affine, channels);
      check_.eps(options.eps);
      masks_.emplace(check_, in_.masks, in_.x);
      affine_.emplace(check_, in_.affine);
    });
  }

  [[nodiscard]] std::int64_t channels() const override { return 2 * channels_; }
  [[nodiscard]] packet_header header() const override {
    auto own = make_header<T>(name, channels(), 0, options_.exchange, check_);
    name_complex<T>(own);
    return own;
  }
  [[nodiscard]] batch_norm_saved const* saves_to() const override { return saved_; }
  void fail() override { forget(*saved_, statistics_scope::constant); }
  void require_valid() const override { throw_fault(name, check_); }

  void run_alone() override {
    start_saved(*saved_, channels(), statistics_scope::constant, options_, -1, {});
    std::ranges::copy(components_of(in_.running.mean), saved_->mean.begin());
    for (std::size_t c = 0; c < in_.running.var.size(); ++c)
      std::ranges::fill_n(saved_->inv_std.begin() + static_cast<std::ptrdiff_t>(2 * c), 2,
                          inverse_deviation(static_cast<double>(in_.running.var[c]), options_.variance, options_.eps));
    bool const follow = all_follow(in_.x) && all_follow(in_.y), by_numbers = goes_by_numbers(in_.affine, in_.x, follow);
    for_each_range(exec_, {0, channels_}, follow || by_numbers, [&](host::executor_ref exec, channel_span range) {
      normalize_complex<T>(exec, range, in_, *saved_, *affine_, *masks_, by_numbers);
    });
  }

private:
  host::executor_ref exec_;
  std::int64_t channels_; ///< complex ones
  complex_forward_operands<T> in_;
  batch_norm_options options_;
  batch_norm_saved* saved_;
  call_check check_;
  std::optional<complex_masks<T>> masks_;
  std::optional<affine_of_components<T>> affine_;
};

} // namespace syncnorm::detail
