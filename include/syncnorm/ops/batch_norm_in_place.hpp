#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/recover.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>

namespace syncnorm {

/// What a forward pass in place keeps for its backward pass: gamma, beta, and of x the channels that cannot be recovered from y, as
/// `is_recoverable` says. So a tensor takes sizeof(T)·(1 + kept channels / all channels) bytes per element from the
/// forward pass to the backward pass, where x and y apart take 2·sizeof(T).
template <class T>
class batch_norm_kept {
public:
  /// Keeps what has to be kept of x, before y is written over it.
  template <class P>
  void keep(tensor_view<T const> x, affine_parameters<P> affine, batch_norm_epilogue<T> const& epilogue) {
    channels_.clear();
    elements_.clear();
    gamma_.clear();
    beta_.clear();
    holds_x_ = recovering_ = false;
    like_ = x;
    like_.data = nullptr;
    host::channel_values const gamma{affine.gamma, 1}, beta{affine.beta, 0};
    auto const fits = [&](std::span<P const> values) {
      return values.empty() || values.size() == static_cast<std::size_t>(x.channels);
    };
    // What is wrong with x or the parameters, the pass says.
    detail::call_check check;
    check.tensor(x, "x", x.channels);
    if (check.failed() || x.size() == 0 || detail::overlaps_itself(x) || !fits(affine.gamma) || !fits(affine.beta))
      return;
    for (std::int64_t c = 0; c < x.channels; ++c) {
      auto const i = static_cast<std::size_t>(c);
      gamma_.push_back(gamma[i]);
      beta_.push_back(beta[i]);
      if (!is_recoverable(gamma[i], beta[i], recoverable_slope(epilogue.activation), recoverable_ratio<T>))
        channels_.push_back(c);
    }
    elements_.reserve(channels_.size() * static_cast<std::size_t>(x.count()));
    for (auto const c : channels_) for_each_of(x, c, [&](T const& value) { elements_.push_back(value); });
  }

  /// Makes y, which the forward pass wrote over x, x again, unless it is so already. Positions that a mask made 0 become
  /// anything, on which no gradient depends. Says what is wrong with y, or nothing.
  [[nodiscard]] std::string restore(host::executor_ref exec, tensor_view<T> y, batch_norm_saved const& saved,
                                    batch_norm_epilogue<T> const& epilogue) {
    if (!holds_x_) {
      if (recovering_)
        return "a backward pass failed while it recovered x, so that y is x in part; a forward pass has to follow";
      recovering_ = true; // and stays so where an executor throws
      auto fault = recover(exec, y, y, saved, epilogue);
      recovering_ = false;
      holds_x_ = fault.empty();
      return fault;
    }
    detail::call_check check;
    check.same_extents(y, "y", like_);
    return check.fault();
  }

  /// The same into x, which may be y, any number of times.
  [[nodiscard]] std::string recover(host::executor_ref exec, std::type_identity_t<tensor_view<T const>> y,
                                    tensor_view<T> x, batch_norm_saved const& saved,
                                    batch_norm_epilogue<T> const& epilogue) const {
    detail::call_check check;
    auto const channels = static_cast<std::int64_t>(saved.mean.size());
    check.same_extents(y, "y", like_);
    check.output(x, "x", like_);
    check.epilogue(epilogue, like_, "the residual", "the mask");
    check.require(y.channels == channels, [&] { return check.text("the statistics have ", channels, " channels"); });
    if (check.failed() || y.size() == 0) return check.fault();
    host::prepared_epilogue<T> const prepared{{epilogue.activation, epilogue.residual}};
    std::int64_t first = 0;
    auto const recover_until = [&](std::int64_t end) {
      std::int64_t const length = end - first;
      if (length <= 0) return;
      using host::detail::channels_of;
      host::recover(exec, y.channel_range(first, length), x.channel_range(first, length),
                    channels_of(std::span<double const>{saved.mean}, first, length),
                    channels_of(std::span<double const>{saved.inv_std}, first, length),
                    affine_parameters<double>{channels_of(std::span{gamma_}, first, length),
                                              channels_of(std::span{beta_}, first, length)},
                    prepared.channel_range(first, length));
    };
    auto from = elements_.begin();
    for (auto const c : channels_) {
      recover_until(c);
      first = c + 1;
      for_each_of(x, c, [&](T& value) { value = *from++; });
    }
    recover_until(y.channels);
    return {};
  }

  /// The channels that are kept, in order.
  [[nodiscard]] std::span<std::int64_t const> channels() const noexcept { return channels_; }
  /// Memory that is kept for elements.
  [[nodiscard]] std::size_t bytes() const noexcept { return elements_.size() * sizeof(T); }

private:
  template <class View, class F>
  static void for_each_of(View const& x, std::int64_t channel, F const& f) {
    for (std::int64_t n = 0; n < x.samples; ++n)
      for (std::int64_t s = 0; s < x.spatial; ++s) f(x(n, channel, s));
  }

  tensor_view<T const> like_{};
  std::vector<double> gamma_, beta_;
  std::vector<std::int64_t> channels_;
  std::vector<T> elements_;
  bool holds_x_ = true, recovering_ = false;
};

} // namespace syncnorm
