#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/double_backward.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/double_backward_buffers.hpp>
#include <syncnorm/ops/detail/double_backward_operands.hpp>
#include <syncnorm/ops/detail/double_backward_steps.hpp>
#include <syncnorm/ops/detail/pass_epilogues.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/turned_batches.hpp>

namespace syncnorm::detail {

/// A double backward pass, as `batch_norm_double_backward` documents it.
template <class T, class P>
class double_backward final : public double_backward_steps {
public:
  /// Everything is borrowed, and checked.
  double_backward(host::executor_ref exec, std::int64_t channels, double_backward_operands<T, P> const& operands,
                  batch_norm_saved const& saved, batch_norm_caller const& caller)
      : double_backward_steps{channels, saved}, exec_{exec}, in_{operands} {
    look_into(check_, [&] {
      check_.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
      check_saved(1);
      auto const batches = in_.x.size();
      check_count(in_.dy.size(), batches, "dy", true);
      check_count(in_.u.size(), batches, "the gradient with respect to dx");
      check_count(in_.v.size(), batches, "the gradient with respect to dresidual");
      check_count(in_.to_dy.size(), batches, "the gradient to dy");
      check_count(in_.to_x.size(), batches, "the gradient to x");
      for (std::size_t k = 0; k < batches && !check_.failed(); ++k) check_batch(k, batches);
      check_.own_count(check_.count_of(in_.x), saved.own_count);
      pass_epilogues<T>::validate(check_, in_.epilogues, in_.x);
      for (auto const& epilogue : in_.epilogues) check_.not_exponential(epilogue.activation, "double backward");
      check_outputs_apart(check_, in_);
      for (std::size_t k = 0; k < in_.v.size() && !check_.failed(); ++k)
        check_.require(!in_.v[k].is_given() || (!in_.epilogues.empty() && in_.epilogues[k].has_residual()) ||
                           in_.x[k].size() == 0,
                       [&] { return "there is a gradient with respect to dresidual, but no residual"; });
      check_.channel_values(in_.affine.gamma, "gamma", channels);
      check_.channel_values(in_.affine.beta, "beta", channels);
      check_.channel_values(in_.a, "the gradient with respect to that of gamma", channels);
      check_.channel_values(in_.b, "the gradient with respect to that of beta", channels);
      check_.channel_values(in_.gamma_gradient, "the gradient of gamma", channels);
      if (!check_.failed()) turned_.turn(in_.x, in_.dy, in_.x, in_.u, in_.v, in_.to_dy, in_.to_x, in_.epilogues);
      epilogues_.emplace(check_, in_.epilogues, in_.x);
    });
  }

private:
  [[nodiscard]] static double value_of(std::span<P const> values, std::size_t c, double otherwise) {
    return values.empty() ? otherwise : as_double(values[c]);
  }

  void check_batch(std::size_t k, std::size_t batches) {
    auto const& x = in_.x[k];
    check_.tensor(x, batch_name("x", k, batches), channels_);
    check_.same_extents(in_.dy[k], batch_name("dy", k, batches), x);
    auto const read = [&](tensor_view<T const> const& view, char const* what) {
      if (view.is_given()) check_.same_extents(view, batch_name(what, k, batches), x);
    };
    auto const written = [&](tensor_view<T> const& view, char const* what) {
      if (view.is_given()) check_.output(view, batch_name(what, k, batches), x);
    };
    read(of(in_.u, k), "the gradient with respect to dx");
    read(of(in_.v, k), "the gradient with respect to dresidual");
    written(of(in_.to_dy, k), "the gradient to dy");
    written(of(in_.to_x, k), "the gradient to x");
  }

  [[nodiscard]] packet_header header() const override {
    return make_header<T>(name, channels_, check_.count_of(in_.x), saved_->exchange, check_);
  }

  [[nodiscard]] host::second_order_operands<T> operands(std::size_t k) const {
    return {in_.dy[k],       in_.x[k],     of(in_.u, k),    of(in_.v, k), of(in_.to_dy, k),
            of(in_.to_x, k), saved_->mean, saved_->inv_std, in_.affine,   (*epilogues_)[k]};
  }
  [[nodiscard]] static host::double_backward_sums sums_in(std::vector<double>& sums) {
    auto const of = [&](row which) { return buffers_type::of(sums, which); };
    return {of(row::g), of(row::g_xmu), of(row::u), of(row::u_xmu), of(row::u_g)};
  }

  void local() override {
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      bool const first = k == 0;
      host::double_backward_reduce(exec_, operands(k), sums_in(first ? buffers_->own : buffers_->more));
      for (std::size_t i = 0; !first && i < buffers_->own.size(); ++i) buffers_->own[i] += buffers_->more[i];
    }
    weigh(0, channels_);
  }

  void apply() override {
    finish(0, channels_);
    map_all();
  }
  void map_all() {
    for (std::size_t k = 0; k < in_.x.size(); ++k)
      host::double_backward_elemt(exec_, operands(k), std::span<combination const>{buffers_->for_dy},
                                  std::span<combination const>{buffers_->for_x});
  }

  void run_alone() override {
    if (in_.x.size() != 1) {
      local();
      buffers_->all = buffers_->own;
      return apply();
    }
    host::double_backward_in_blocks(
        exec_, operands(0), sums_in(buffers_->own), std::span<combination const>{buffers_->for_dy},
        std::span<combination const>{buffers_->for_x}, [&](std::int64_t first, std::int64_t length) {
          weigh(first, length);
          for (std::size_t v = 0; v < buffers_type::rows; ++v) {
            channel_span const part{first, length};
            auto const which = static_cast<row>(v);
            std::ranges::copy(part_of(own(which), part), part_of(all(which), part).begin());
          }
          finish(first, length);
        });
  }

  /// The sums times a, which is each rank's own.
  void weigh(std::int64_t first, std::int64_t length) {
    for (auto c = static_cast<std::size_t>(first); c < static_cast<std::size_t>(first + length); ++c) {
      double const a = value_of(in_.a, c, 0);
      own(row::a_g)[c] = times_given(a, own(row::g)[c]);
      own(row::a_g_xmu)[c] = times_given(a, own(row::g_xmu)[c]);
    }
  }

  /// What some channels of dy and x get, by the sums of all ranks.
  void finish(std::int64_t first, std::int64_t length) {
    for (auto c = static_cast<std::size_t>(first); c < static_cast<std::size_t>(first + length); ++c) {
      auto const made = make_second_order_coefficients(saved_->mean[c], saved_->inv_std[c],
                                                       value_of(in_.affine.gamma, c, 1), value_of(in_.a, c, 0),
                                                       value_of(in_.b, c, 0), sums_of(c), saved_->normalized());
      buffers_->for_dy[c] = made.for_dy;
      buffers_->for_x[c] = made.for_x;
    }
  }

  void commit() override {
    for (std::size_t c = 0; c < in_.gamma_gradient.size(); ++c) {
      double const r = saved_->inv_std[c];
      double const more = second_order_gamma(r, own(row::u)[c], r * own(row::u_xmu)[c], own(row::u_g)[c], sums_of(c),
                                             saved_->normalized());
      in_.gamma_gradient[c] = from_double<P>(as_double(in_.gamma_gradient[c]) + more);
    }
  }

  /// Of all ranks.
  [[nodiscard]] second_order_sums sums_of(std::size_t c) const {
    auto const sum = [&](row which) { return all(which)[c]; };
    double const r = saved_->inv_std[c];
    return {sum(row::g),   r * sum(row::g_xmu), sum(row::u),          r * sum(row::u_xmu),
            sum(row::u_g), sum(row::a_g),       r * sum(row::a_g_xmu)};
  }

  host::executor_ref exec_;
  double_backward_operands<T, P> in_;
  turned_batches<tensor_view<T const>, tensor_view<T const>, tensor_view<T const>, tensor_view<T const>, tensor_view<T>,
                 tensor_view<T>, batch_norm_epilogue<T>>
      turned_;
  std::optional<pass_epilogues<T>> epilogues_;
};

} // namespace syncnorm::detail
