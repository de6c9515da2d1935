#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/argument_check.hpp>
#include <syncnorm/core/detail/view_checks.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::detail {

/// What is wrong with statistics of one value.
[[nodiscard]] inline std::string one_value_fault(bool of_all_ranks) {
  return of_all_ranks ? "training needs more than 1 value per channel over all ranks, got 1"
                      : "statistics of one rank need more than 1 value per channel, got 1";
}

/// What is wrong with a call of a pass: with its tensors, and what else it takes.
class call_check : public argument_check {
public:
  template <class P>
  void channel_values(std::span<P> values, std::string_view name, std::int64_t channels) {
    require(values.empty() || values.size() == static_cast<std::size_t>(channels),
            [&] { return text(name, " has ", values.size(), " elements, expected ", channels); });
    require(values.empty() || values.data() != nullptr, [&] { return text(name, " is null"); });
  }

  /// `residual_name`, `mask_name`: of the operands of `given`.
  template <class T, class Name>
  void epilogue(batch_norm_epilogue<T> const& given, tensor_view<T const> const& x, Name residual_name,
                Name mask_name) {
    double const slope = given.activation.negative_slope;
    require(std::isfinite(static_cast<accumulate_t<T>>(slope)), [&] {
      return text("the negative slope of the activation is ", slope, ", expected a number",
                  std::isfinite(slope) ? " that float holds" : "");
    });
    if (given.has_residual()) same_extents(given.residual, residual_name, x);
    mask(given.mask, mask_name, x);
  }

  /// Of a pass that takes activations of straight lines alone.
  void not_exponential(activation const& given, std::string_view pass) {
    require(!given.exponential, [&] { return text("the activation is exponential, which ", pass, " does not take"); });
  }

  template <class T, class Name>
  void mask(mask_view const& given, Name name, tensor_view<T> const& x) {
    if (!given) return;
    require(given.samples == x.samples && given.spatial == x.spatial, [&] {
      return text(name, " is [", given.samples, ", ", given.spatial, "], expected [", x.samples, ", ", x.spatial,
                  "]: a position for each sample and place of x");
    });
    require(given.data != nullptr || x.count() == 0, [&] { return text(name, " is null"); });
    require(fits_memory<2>({given.samples, given.spatial}, {given.stride_n, given.stride_s}, 1), [&] {
      return text(name, " has the strides [", given.stride_n, ", ", given.stride_s, "], which no memory has room for");
    });
  }

  /// N·S of all micro-batches; 0 where something is wrong, maybe with these numbers.
  template <class T>
  [[nodiscard]] std::int64_t count_of(std::span<tensor_view<T> const> batches) const {
    std::int64_t count = 0;
    if (failed()) return count;
    for (auto const& x : batches) count += x.count();
    return count;
  }

  /// x, or the x of all micro-batches, as in the forward pass. `expected`: −1 where it may be any.
  void own_count(std::int64_t count, std::int64_t expected) {
    require(expected < 0 || count == expected,
            [&] { return text("x has ", count, " values per channel, in the forward pass ", expected); });
  }

  /// `running` as `running_statistics`, or those of complex channels.
  template <class Running>
  void options(batch_norm_options const& options, Running const& running, std::int64_t channels) {
    eps(options.eps);
    double const momentum = options.momentum.value_or(0);
    require(momentum >= 0 && momentum <= 1,
            [&] { return text("momentum is ", momentum, ", expected a number in [0, 1]"); });
    one_of(options.variance, running_variance::standard_deviation, "the running variance");
    one_of(options.exchange, exchange_policy::reduce, "the exchange policy");
    one_of(options.normalize_by, batch_variance::unbiased, "the variance that normalizes");
    channel_values(running.mean, "running_mean", channels);
    channel_values(running.var, "running_var", channels);
    require(running.mean.empty() == running.var.empty(),
            [] { return "only one of running_mean and running_var is given"; });
    require(options.momentum || running.mean.empty() || running.num_batches_tracked != nullptr,
            [] { return "the cumulative average needs num_batches_tracked, which is null"; });
  }
  /// What a pass adds 1 to, and a cumulative average goes on from, in memory of the host.
  void batches_tracked(batch_norm_options const& options, std::int64_t const* tracked) {
    if (tracked == nullptr) return;
    require(options.momentum || *tracked >= 0,
            [&] { return text("num_batches_tracked is ", *tracked, ", expected at least 0"); });
    counts_on(*tracked, "num_batches_tracked");
  }
  /// `value` is an enumerator, of which the first is 0.
  template <class Enum>
  void one_of(Enum value, Enum last, std::string_view name) {
    require(value <= last,
            [&] { return text(name, " is ", static_cast<int>(value), ", expected 0 to ", static_cast<int>(last)); });
  }
  void counts_on(std::int64_t counter, std::string_view name) {
    require(counter < std::numeric_limits<std::int64_t>::max(),
            [&] { return text(name, " is ", counter, ", the most that it can count"); });
  }
};

} // namespace syncnorm::detail
