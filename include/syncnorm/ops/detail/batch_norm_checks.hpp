#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::detail {

/// Collects the first thing that is wrong with a call. It throws nothing, because the other ranks have to be told
/// first.
class call_check {
public:
  [[nodiscard]] std::string const& fault() const noexcept { return fault_; }
  [[nodiscard]] bool failed() const noexcept { return !fault_.empty(); }

  void require(bool holds, std::string const& otherwise) {
    if (!holds && fault_.empty()) fault_ = otherwise;
  }

  template <class T>
  void tensor(tensor_view<T> const& x, char const* name, std::int64_t channels) {
    require(x.samples >= 0 && x.channels >= 0 && x.spatial >= 0, name + (" has a negative extent: " + extents(x)));
    require(x.channels == channels,
            name + (" has " + std::to_string(x.channels) + " channels, expected " + std::to_string(channels)));
    require(x.data != nullptr || x.size() == 0, name + (" is null, its extents are " + extents(x)));
  }

  /// `y` is a tensor with the extents of `x`.
  template <class T>
  void same_extents(tensor_view<T> const& y, char const* name, tensor_view<std::remove_const_t<T> const> const& x,
                    char const* like) {
    require(y.samples == x.samples && y.channels == x.channels && y.spatial == x.spatial,
            name + (" is " + extents(y)) + ", expected " + extents(x) + " as " + like);
    require(y.data != nullptr || y.size() == 0, name + std::string{" is null"});
  }

  /// The same for a tensor that is written.
  template <class T>
  void output(tensor_view<T> const& y, char const* name, tensor_view<T const> const& x, char const* like) {
    same_extents(y, name, x, like);
    require((y.stride_n != 0 || y.samples <= 1) && (y.stride_c != 0 || y.channels <= 1) &&
                (y.stride_s != 0 || y.spatial <= 1),
            name + std::string{" has a zero stride, so its elements overlap"});
  }

  template <class P>
  void channel_values(std::span<P> values, char const* name, std::int64_t channels) {
    require(values.empty() || values.size() == static_cast<std::size_t>(channels),
            name + (" has " + std::to_string(values.size()) + " elements, expected " + std::to_string(channels)));
    require(values.empty() || values.data() != nullptr, name + std::string{" is null"});
  }

  void eps(double value) {
    require(std::isfinite(value) && value >= 0, "eps is " + std::to_string(value) + ", expected a number >= 0");
  }

  template <class P>
  void options(batch_norm_options const& options, running_statistics<P> const& running, std::int64_t channels) {
    eps(options.eps);
    if (options.momentum)
      require(*options.momentum >= 0 && *options.momentum <= 1,
              "momentum is " + std::to_string(*options.momentum) + ", expected a number in [0, 1]");
    channel_values(running.mean, "running_mean", channels);
    channel_values(running.var, "running_var", channels);
    require(running.mean.empty() == running.var.empty(), "only one of running_mean and running_var is given");
    require(options.momentum || running.mean.empty() || running.num_batches_tracked != nullptr,
            "the cumulative average needs num_batches_tracked, which is null");
  }

private:
  template <class T>
  static std::string extents(tensor_view<T> const& x) {
    return "[" + std::to_string(x.samples) + ", " + std::to_string(x.channels) + ", " + std::to_string(x.spatial) + "]";
  }

  std::string fault_;
};

} // namespace syncnorm::detail
