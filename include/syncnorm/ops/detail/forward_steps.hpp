#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/batches_in_blocks.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/part_after_part.hpp>
#include <syncnorm/host/running_statistics.hpp>
#include <syncnorm/host/stores.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/parts.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_epilogues.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/pass_tensors.hpp>
#include <syncnorm/ops/detail/turned_batches.hpp>

namespace syncnorm::detail {

/// inv_std = 1/√(var + eps) of every channel; 0 where nothing was counted.
inline void finish_statistics(std::span<double const> m2, normalized_count count, double eps,
                              std::span<double> inv_std) {
  for (std::size_t c = 0; c < m2.size(); ++c)
    inv_std[c] = count.n > 0 ? inverse_deviation(m2[c] / static_cast<double>(count.degrees_of_freedom()), eps) : 0.0;
}

/// Moves the running statistics towards `saved`. `m2` is used up.
template <class P>
void update_running_statistics(running_statistics<P> running, batch_norm_options const& options,
                               batch_norm_saved const& saved, std::span<double> m2) {
  if (running.mean.empty() || saved.count == 0) return;
  double const weight =
      options.momentum ? *options.momentum : 1.0 / static_cast<double>(*running.num_batches_tracked + 1);
  auto const divisor = running_degrees_of_freedom(options.variance, saved.normalized());
  for (double& value : m2) value /= static_cast<double>(divisor);
  if (options.variance == running_variance::standard_deviation)
    for (double& value : m2) value = std::sqrt(value + options.eps);
  host::update_running(running.mean, std::span<double const>{saved.mean}, weight);
  host::update_running(running.var, std::span<double const>{m2}, weight);
  if (running.num_batches_tracked != nullptr) ++*running.num_batches_tracked;
}

/// Throws if all ranks have one position.
inline void require_several(std::string_view pass, std::int64_t count) {
  if (count == 1) throw invalid_argument_error{std::string{pass} + ": " + one_value_fault(true)};
}

/// Makes `saved` that of one more forward pass, whose statistics, 0 at first, are to come. `own_count`: of this rank.
inline void start_saved(batch_norm_saved& saved, std::int64_t channels, statistics_scope scope,
                        batch_norm_options const& options, std::int64_t own_count, exchange_summary const& all) {
  ++saved.passes;
  saved.scope = scope;
  saved.exchange = options.exchange;
  saved.normalized_by = options.normalize_by;
  saved.count = all.count;
  saved.own_count = own_count;
  saved.backward_needed = all.backward_needed;
  saved.mean.assign(static_cast<std::size_t>(channels), 0.0);
  saved.inv_std.assign(static_cast<std::size_t>(channels), 0.0);
}

/// What a forward pass reads and writes: K micro-batches that share one statistic, and the state of the layer.
template <class T, class P>
struct forward_operands {
  std::span<tensor_view<T const> const> x;
  std::span<tensor_view<T> const> y;
  affine_parameters<P> affine;
  running_statistics<P> running;
  statistics_scope scope = statistics_scope::all_ranks; ///< or this_rank, which exchanges nothing
  std::span<batch_norm_epilogue<T> const> epilogues{};  ///< none, or K
};

/// The steps of a forward pass in training.
template <class T, class P>
class forward_steps final : public pass_steps {
public:
  static constexpr std::string_view name = "batch_norm forward";

  /// Everything is borrowed, and checked.
  forward_steps(host::executor_ref exec, std::int64_t channels, forward_operands<T, P> const& operands,
                batch_norm_options const& options, batch_norm_saved& saved, pass_buffers& buffers,
                batch_norm_caller const& caller)
      : exec_{exec}, channels_{channels}, in_{operands}, options_{options}, saved_{&saved}, buffers_{&buffers},
        backward_{caller.backward} {
    look_into(check_, [&] {
      check_.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
      check_.require(channels >= 0, [&] { return check_.text("the number of channels is negative: ", channels); });
      check_forward_tensors<T>(check_, in_.x, in_.y, channels);
      check_.channel_values(in_.affine.gamma, "gamma", channels);
      check_.channel_values(in_.affine.beta, "beta", channels);
      check_.options(options, in_.running, channels);
      check_.batches_tracked(options, in_.running.num_batches_tracked);
      pass_epilogues<T>::validate(check_, in_.epilogues, in_.x);
      check_output_apart<T>(check_, in_.x.size(), {"y", in_.y}, {{"x", in_.x}, named_views<T>{in_.epilogues}}, true);
      if (!check_.failed()) turned_.turn(in_.x, in_.x, in_.y, in_.epilogues);
      epilogues_.emplace(check_, in_.epilogues, in_.x);
      if (!collective()) check_.require(count() != 1, [] { return one_value_fault(false); });
    });
  }

  [[nodiscard]] call_check& check() noexcept { return check_; }
  [[nodiscard]] std::int64_t count() const {
    std::int64_t all = 0;
    if (check_.failed()) return all;
    for (std::size_t k = 0; k < in_.x.size(); ++k) all += counted(k);
    return all;
  }

  [[nodiscard]] merge_rule rule() const override { return merge_rule::moments; }
  [[nodiscard]] std::int64_t channels() const override { return channels_; }
  [[nodiscard]] bool collective() const override { return in_.scope == statistics_scope::all_ranks; }

  [[nodiscard]] packet_header header() const override {
    auto own = make_forward_header<T>(channels_, count(), in_.affine, in_.running, options_, check_);
    name_batches_averaged(own, in_.running.num_batches_tracked, check_);
    own.backward = static_cast<std::int32_t>(backward_);
    return own;
  }

  void local(channel_span part, std::span<double> mean, std::span<double> m2) override {
    if (!check_.failed()) local_by(exec_, part, mean, m2);
  }

  void accept(exchange_summary const& all) override {
    require_several(name, all.count);
    start_saved(*saved_, channels_, in_.scope, options_, check_.count_of(in_.x), all);
    buffers_->first.assign(static_cast<std::size_t>(channels_), 0.0);
  }

  [[nodiscard]] std::array<std::span<double>, 2> totals(channel_span part) override {
    return {part_of(std::span{saved_->mean}, part), part_of(std::span{buffers_->first}, part)};
  }

  void apply(channel_span part) override { apply_by(exec_, part); }

  void apply_and_local(channel_span part, channel_span next, std::span<double> next_mean,
                       std::span<double> next_m2) override {
    if (in_.x.size() != 1 || (*epilogues_)[0].does_something())
      return pass_steps::apply_and_local(part, next, next_mean, next_m2);
    finish(part);
    host::normalize_and_local_moments(
        exec_, part_of(in_.x[0], part), part_of(in_.y[0], part), part_of(std::span<double const>{saved_->mean}, part),
        part_of(std::span<double const>{saved_->inv_std}, part),
        affine_parameters<P>{part_of(in_.affine.gamma, part), part_of(in_.affine.beta, part)},
        host::stores_for(in_.y[0]), part_of(in_.x[0], next), next_mean, next_m2);
  }

  void commit(channel_span part, std::span<double const>, std::span<double const>) override {
    // The counter counts a pass once, so the last span takes all.
    if (part.first + part.length == channels_)
      update_running_statistics(in_.running, options_, *saved_, buffers_->first);
  }

  [[nodiscard]] batch_norm_saved const* saves_to() const override { return saved_; }
  void fail() override { forget(*saved_, in_.scope, options_.exchange); }

  void require_valid() const override {
    throw_fault(name, check_);
    require_several(name, count());
  }
  void run_alone() override {
    accept({count(), backward_ == backward_pass::needed});
    if (in_.x.size() == 1) {
      host::forward_in_blocks(
          exec_, in_.x[0], in_.y[0], saved_->mean, buffers_->first, saved_->inv_std, in_.affine,
          [&](std::int64_t first, std::int64_t length) {
            finish({first, length});
          },
          (*epilogues_)[0]);
    } else {
      host::for_each_block(exec_, channels_, in_.x, 1,
                           [&](host::executor_ref exec, std::int64_t first, std::int64_t length) {
                             channel_span const part{first, length};
                             auto const [mean, m2] = totals(part);
                             local_by(exec, part, mean, m2);
                             apply_by(exec, part);
                           });
    }
  }

private:
  /// Elements of a channel of micro-batch k that count.
  [[nodiscard]] std::int64_t counted(std::size_t k) const { return (*epilogues_)[k].count(in_.x[k]); }

  void local_by(host::executor_ref exec, channel_span part, std::span<double> mean, std::span<double> m2) const {
    auto const moments_of = [&](std::size_t k, std::span<double> its_mean, std::span<double> its_m2) {
      host::local_moments(exec, part_of(in_.x[k], part), (*epilogues_)[k], its_mean, its_m2);
    };
    if (in_.x.size() == 1) return moments_of(0, mean, m2);
    std::ranges::fill(mean, 0.0);
    std::ranges::fill(m2, 0.0);
    batch_values more{mean.size()};
    std::int64_t merged = 0;
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      moments_of(k, more.first(), more.second());
      merge_channels(merged, mean, m2, counted(k), more.first(), more.second());
      merged += counted(k);
    }
  }

  void apply_by(host::executor_ref exec, channel_span part) {
    finish(part);
    auto const mean = part_of(std::span<double const>{saved_->mean}, part);
    auto const inv_std = part_of(std::span<double const>{saved_->inv_std}, part);
    affine_parameters<P> const affine{part_of(in_.affine.gamma, part), part_of(in_.affine.beta, part)};
    for (auto k = in_.x.size(); k-- > 0;) { // backwards: what was read last is the likeliest to be in the cache
      auto const x = part_of(in_.x[k], part);
      auto const y = part_of(in_.y[k], part);
      auto const stores = host::stores_for(in_.y[k]);
      if (auto const& epilogue = (*epilogues_)[k]; epilogue.does_something())
        host::normalize(exec, x, y, mean, inv_std, affine, epilogue.channel_range(part.first, part.length), stores);
      else
        host::normalize(exec, x, y, mean, inv_std, affine, stores, next_of(in_.x, k, 1, part));
    }
  }

  void finish(channel_span part) {
    finish_statistics(part_of(std::span<double const>{buffers_->first}, part), saved_->normalized(), options_.eps,
                      part_of(std::span{saved_->inv_std}, part));
  }

  host::executor_ref exec_;
  std::int64_t channels_;
  forward_operands<T, P> in_;
  turned_batches<tensor_view<T const>, tensor_view<T>, batch_norm_epilogue<T>> turned_;
  batch_norm_options options_;
  batch_norm_saved* saved_;
  pass_buffers* buffers_;
  backward_pass backward_;
  call_check check_;
  std::optional<pass_epilogues<T>> epilogues_;
};

} // namespace syncnorm::detail
