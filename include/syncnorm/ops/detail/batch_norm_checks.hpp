#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/overlap.hpp>
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

/// Collects the first thing that is wrong with a call. It throws nothing, because the other ranks have to be told first;
/// and it builds no text unless something is wrong.
class call_check {
public:
  [[nodiscard]] std::string const& fault() const noexcept { return fault_; }
  [[nodiscard]] bool failed() const noexcept { return !fault_.empty(); }

  /// `message()` says what is wrong unless `holds`.
  template <class Message>
  void require(bool holds, Message const& message) {
    if (!holds && fault_.empty()) fault_ = message();
  }

  /// A name is anything that can be written to a stream.
  template <class T, class Name>
  void tensor(tensor_view<T> const& x, Name name, std::int64_t channels) {
    require(x.samples >= 0 && x.channels >= 0 && x.spatial >= 0,
            [&] { return text(name, " has a negative extent: ", extents_of(x)); });
    require(x.channels == channels, [&] { return text(name, " has ", x.channels, " channels, expected ", channels); });
    require(is_countable(x), [&] { return text(name, " has more elements than can be counted: ", extents_of(x)); });
    require_data(x, name);
  }

  /// `y` is a tensor with the extents of `x`.
  template <class T, class Name>
  void same_extents(tensor_view<T> const& y, Name name, tensor_view<std::remove_const_t<T> const> const& x) {
    require(y.samples == x.samples && y.channels == x.channels && y.spatial == x.spatial,
            [&] { return text(name, " is ", extents_of(y), ", expected ", extents_of(x), " as x"); });
    require_data(y, name);
  }

  /// The same for a tensor that is written.
  template <class T, class Name>
  void output(tensor_view<T> const& y, Name name, tensor_view<T const> const& x) {
    same_extents(y, name, x);
    if (failed()) return;
    require(!overlaps_itself(y),
            [&] { return text(name, " has the strides ", strides_of(y), ", by which its elements overlap"); });
  }

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

  void eps(double value) {
    require(std::isfinite(value) && value >= 0, [&] { return text("eps is ", value, ", expected a number >= 0"); });
  }

  /// `running` as `running_statistics`, or those of complex channels.
  template <class Running>
  void options(batch_norm_options const& options, Running const& running, std::int64_t channels) {
    eps(options.eps);
    double const momentum = options.momentum.value_or(0);
    require(momentum >= 0 && momentum <= 1,
            [&] { return text("momentum is ", momentum, ", expected a number in [0, 1]"); });
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
  void counts_on(std::int64_t counter, std::string_view name) {
    require(counter < std::numeric_limits<std::int64_t>::max(),
            [&] { return text(name, " is ", counter, ", the most that it can count"); });
  }

  /// The parts of a message, one after the other.
  template <class... Parts>
  [[nodiscard]] static std::string text(Parts const&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    return message.str();
  }

private:
  template <class T, class Name>
  void require_data(tensor_view<T> const& x, Name name) {
    if (failed()) return; // of what cannot be counted there is no size
    require(x.data != nullptr || x.size() == 0,
            [&] { return text(name, " is null, its extents are ", extents_of(x)); });
    require(fits_memory(x),
            [&] { return text(name, " has the strides ", strides_of(x), ", which no memory has room for"); });
  }

  std::string fault_;
};

} // namespace syncnorm::detail
