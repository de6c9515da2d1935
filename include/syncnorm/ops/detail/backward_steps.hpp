#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/batches_in_blocks.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/part_after_part.hpp>
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

/// sum += value, in double, and rounded once.
template <class P>
void add_rounded(P& sum, double value) {
  sum = from_double<P>(as_double(sum) + value);
}

/// gradients.gamma += inv_std·sum_dy_xmu, gradients.beta += sum_dy, for a span of channels.
template <class P>
void add_affine_gradients(affine_gradients<P> gradients, std::span<double const> inv_std,
                          std::span<double const> sum_dy, std::span<double const> sum_dy_xmu) {
  for (std::size_t c = 0; c < gradients.gamma.size(); ++c) add_rounded(gradients.gamma[c], inv_std[c] * sum_dy_xmu[c]);
  for (std::size_t c = 0; c < gradients.beta.size(); ++c) add_rounded(gradients.beta[c], sum_dy[c]);
}

/// What a backward pass reads and writes: the K micro-batches of the forward pass. No dx: not needed.
template <class T, class P>
struct backward_operands {
  std::span<tensor_view<T const> const> dy, x;
  std::span<tensor_view<T> const> dx;
  affine_parameters<P> affine;
  affine_gradients<P> gradients;
  std::span<batch_norm_epilogue<T> const> epilogues{}; ///< those of the forward pass: none, or K
  std::span<tensor_view<T> const> dresidual{};         ///< none, or K, of which default views: not needed
};

/// The steps of a backward pass.
template <class T, class P>
class backward_steps final : public pass_steps {
public:
  static constexpr std::string_view name = "batch_norm backward";

  /// Everything is borrowed, and checked. `exchange` as in `batch_norm_backward_options`.
  backward_steps(host::executor_ref exec, std::int64_t channels, backward_operands<T, P> const& operands,
                 batch_norm_saved const& saved, bool exchange, pass_buffers& buffers, batch_norm_caller const& caller)
      : exec_{exec}, channels_{channels}, in_{operands}, saved_{&saved}, saved_passes_{saved.passes},
        buffers_{&buffers}, exchanges_{exchange && saved.scope == statistics_scope::all_ranks}, backward_{
                                                                                                    caller.backward} {
    look_into(check_, [&] {
      check_.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
      check_.require(
          saved.mean.size() == static_cast<std::size_t>(channels) && saved.inv_std.size() == saved.mean.size(), [&] {
            return check_.text("the saved statistics have ", saved.mean.size(), " channels, expected ", channels,
                               "; was there a forward pass?");
          });
      auto const batches = in_.x.size();
      check_backward_tensors<T>(check_, in_.dy, in_.x, in_.dx, channels, saved.own_count);
      pass_epilogues<T>::validate(check_, in_.epilogues, in_.x);
      check_.require(in_.dresidual.empty() || in_.dresidual.size() == batches, [&] {
        return check_.text("there are ", in_.dresidual.size(), " micro-batches of dresidual, expected ", batches,
                           " as of x");
      });
      for (std::size_t k = 0; k < in_.dresidual.size() && !check_.failed(); ++k) {
        if (!in_.dresidual[k].is_given()) continue;
        check_.require((!in_.epilogues.empty() && in_.epilogues[k].has_residual()) || in_.x[k].size() == 0,
                       [&] { return "the gradient of a residual is asked for, but there is no residual"; });
        check_.output(in_.dresidual[k], batch_name("dresidual", k, batches), in_.x[k]);
      }
      check_outputs_apart<T>(check_, batches, {"dx", in_.dx}, {"dresidual", in_.dresidual},
                             {{"dy", in_.dy}, {"x", in_.x}, named_views<T>{in_.epilogues}}, true);
      check_.channel_values(in_.affine.gamma, "gamma", channels);
      check_.channel_values(in_.affine.beta, "beta", channels);
      check_.channel_values(in_.gradients.gamma, "the gradient of gamma", channels);
      check_.channel_values(in_.gradients.beta, "the gradient of beta", channels);
      if (!check_.failed()) turned_.turn(in_.x, in_.dy, in_.x, in_.dx, in_.dresidual, in_.epilogues);
      epilogues_.emplace(check_, in_.epilogues, in_.x);
    });
  }

  [[nodiscard]] call_check& check() noexcept { return check_; }

  [[nodiscard]] merge_rule rule() const override { return merge_rule::sums; }
  [[nodiscard]] std::int64_t channels() const override { return channels_; }
  [[nodiscard]] bool collective() const override { return exchanges_; }

  [[nodiscard]] packet_header header() const override {
    auto own = make_header<T>(name, channels_, check_.count_of(in_.x), saved_->exchange, check_);
    own.backward = static_cast<std::int32_t>(backward_);
    return own;
  }

  void local(channel_span part, std::span<double> sum_dy, std::span<double> sum_dy_xmu) override {
    if (!check_.failed()) local_by(exec_, part, sum_dy, sum_dy_xmu);
  }

  void accept(exchange_summary const&) override {
    if (saved_->passes != saved_passes_)
      throw invalid_argument_error{"batch_norm backward: the layer has had another forward pass since this one began"};
    buffers_->first.assign(static_cast<std::size_t>(channels_), 0.0);
    buffers_->second.assign(static_cast<std::size_t>(channels_), 0.0);
  }

  [[nodiscard]] std::array<std::span<double>, 2> totals(channel_span part) override {
    return {part_of(std::span{buffers_->first}, part), part_of(std::span{buffers_->second}, part)};
  }

  void apply(channel_span part) override { apply_by(exec_, part); }

  void apply_and_local(channel_span part, channel_span next, std::span<double> next_sum_dy,
                       std::span<double> next_sum_dy_xmu) override {
    if (in_.x.size() != 1 || !dx(0).is_given() || (*epilogues_)[0].does_something())
      return pass_steps::apply_and_local(part, next, next_sum_dy, next_sum_dy_xmu);
    std::span<double const> const mean{saved_->mean}, inv_std{saved_->inv_std}, sum_dy{buffers_->first},
        sum_dy_xmu{buffers_->second};
    host::backward_elemt_and_reduce(exec_, part_of(in_.dy[0], part), part_of(in_.x[0], part), part_of(dx(0), part),
                                    part_of(mean, part), part_of(inv_std, part), part_of(in_.affine.gamma, part),
                                    part_of(sum_dy, part), part_of(sum_dy_xmu, part), saved_->normalized(),
                                    host::stores_for(in_.x[0]), part_of(in_.dy[0], next), part_of(in_.x[0], next),
                                    part_of(mean, next), next_sum_dy, next_sum_dy_xmu);
  }

  void commit(channel_span part, std::span<double const> sum_dy, std::span<double const> sum_dy_xmu) override {
    add_affine_gradients<P>({part_of(in_.gradients.gamma, part), part_of(in_.gradients.beta, part)},
                            part_of(std::span<double const>{saved_->inv_std}, part), sum_dy, sum_dy_xmu);
  }

  void require_valid() const override { throw_fault(name, check_); }
  void run_alone() override {
    accept({});
    channel_span const all{0, channels_};
    // By constant statistics dx depends on no sums.
    if (saved_->count == 0 && in_.gradients.gamma.empty() && in_.gradients.beta.empty()) return apply(all);
    std::span const sum_dy{buffers_->first}, sum_dy_xmu{buffers_->second};
    if (in_.x.size() == 1 && (dx(0).is_given() || dresidual(0).is_given())) {
      host::backward_in_blocks(exec_, in_.dy[0], in_.x[0], dx(0), dresidual(0), std::span<double const>{saved_->mean},
                               std::span<double const>{saved_->inv_std}, in_.affine, sum_dy, sum_dy_xmu,
                               saved_->normalized(), (*epilogues_)[0]);
    } else {
      host::for_each_block(exec_, channels_, in_.x, 2,
                           [&](host::executor_ref exec, std::int64_t first, std::int64_t length) {
                             channel_span const part{first, length};
                             auto const [of_dy, of_dy_xmu] = totals(part);
                             local_by(exec, part, of_dy, of_dy_xmu);
                             apply_by(exec, part);
                           });
    }
  }

private:
  void local_by(host::executor_ref exec, channel_span part, std::span<double> sum_dy,
                std::span<double> sum_dy_xmu) const {
    auto const mean = part_of(std::span<double const>{saved_->mean}, part);
    auto const reduce = [&](std::size_t k, std::span<double> first, std::span<double> second) {
      auto const dy = part_of(in_.dy[k], part), x = part_of(in_.x[k], part);
      if (auto const& epilogue = (*epilogues_)[k]; epilogue.does_something())
        host::backward_reduce(exec, dy, x, mean, part_of(std::span<double const>{saved_->inv_std}, part),
                              affine_of(part), epilogue.channel_range(part.first, part.length), first, second);
      else
        host::backward_reduce(exec, dy, x, mean, first, second);
    };
    if (in_.x.size() == 1) return reduce(0, sum_dy, sum_dy_xmu);
    std::ranges::fill(sum_dy, 0.0);
    std::ranges::fill(sum_dy_xmu, 0.0);
    batch_values more{sum_dy.size()};
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      reduce(k, more.first(), more.second());
      for (std::size_t c = 0; c < sum_dy.size(); ++c) {
        sum_dy[c] += more.first()[c];
        sum_dy_xmu[c] += more.second()[c];
      }
    }
  }

  void apply_by(host::executor_ref exec, channel_span part) {
    auto const mean = part_of(std::span<double const>{saved_->mean}, part);
    auto const inv_std = part_of(std::span<double const>{saved_->inv_std}, part);
    auto const sum_dy = part_of(std::span<double const>{buffers_->first}, part);
    auto const sum_dy_xmu = part_of(std::span<double const>{buffers_->second}, part);
    for (auto k = in_.x.size(); k-- > 0;) {
      auto const dy = part_of(in_.dy[k], part), x = part_of(in_.x[k], part);
      auto const stores = host::stores_for(in_.x[k]);
      if (auto const& epilogue = (*epilogues_)[k]; epilogue.does_something()) {
        if (!dx(k).is_given() && !dresidual(k).is_given()) continue;
        host::backward_elemt(exec, dy, x, part_of(dx(k), part), part_of(dresidual(k), part), mean, inv_std,
                             affine_of(part), sum_dy, sum_dy_xmu, saved_->normalized(),
                             epilogue.channel_range(part.first, part.length), stores);
      } else if (dx(k).is_given()) {
        host::backward_elemt(exec, dy, x, part_of(dx(k), part), mean, inv_std, part_of(in_.affine.gamma, part), sum_dy,
                             sum_dy_xmu, saved_->normalized(), stores, next_of(in_.x, k, 2, part));
      }
    }
  }

  /// A default view where it is not wanted.
  [[nodiscard]] tensor_view<T> dx(std::size_t k) const { return in_.dx.empty() ? tensor_view<T>{} : in_.dx[k]; }
  [[nodiscard]] tensor_view<T> dresidual(std::size_t k) const {
    return in_.dresidual.empty() ? tensor_view<T>{} : in_.dresidual[k];
  }
  [[nodiscard]] affine_parameters<P> affine_of(channel_span part) const {
    return {part_of(in_.affine.gamma, part), part_of(in_.affine.beta, part)};
  }

  host::executor_ref exec_;
  std::int64_t channels_;
  backward_operands<T, P> in_;
  turned_batches<tensor_view<T const>, tensor_view<T const>, tensor_view<T>, tensor_view<T>, batch_norm_epilogue<T>>
      turned_;
  batch_norm_saved const* saved_;
  std::int64_t saved_passes_; ///< when the pass began
  pass_buffers* buffers_;
  bool exchanges_;
  backward_pass backward_;
  call_check check_;
  std::optional<pass_epilogues<T>> epilogues_;
};

} // namespace syncnorm::detail
