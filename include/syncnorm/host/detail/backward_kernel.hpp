#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/columns.hpp>
#include <syncnorm/host/detail/gradient_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// Σ dy and Σ dy·(x − mean) of channels over one group of pieces; see reduce_channels. The elements' arithmetic takes the
/// mean rounded to their type; what that loses is added in double.
template <class T>
class backward_kernel {
  using A = accumulate_t<T>;

public:
  backward_kernel(tensor_view<T const> const& dy, tensor_view<T const> const& x, std::span<double const> mean,
                  groups const& parts)
      : dy_{dy}, x_{x}, mean_{mean}, parts_{parts}, layout_{common_layout(dy, x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_xmu) const {
    tensor_view<T const> const dy = dy_.channel_range(first, length), x = x_.channel_range(first, length);
    if (layout_ == layout::rows && are_short_rows(x.spatial))
      return short_rows(dy, x, mean_.data() + first, group, sum_dy, sum_dy_xmu);
    if (layout_ != layout::channels) return rows(dy, x, mean_.data() + first, group, sum_dy, sum_dy_xmu);
    double const* const mean = mean_.data() + first;
    sum_channels<T>(terms{mean}, {dy, x}, parts_, nullptr, group, sum_dy, sum_dy_xmu);
    move_to_means<A>(mean, length, sum_dy, sum_dy_xmu);
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    gradient_rows<T>::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  void rows(tensor_view<T const> const& dy, tensor_view<T const> const& x, double const* mean, std::int64_t group,
            double* sum_dy, double* sum_dy_xmu) const {
    constexpr auto at_once = gradient_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(x_, parts_, 2);
    for (std::int64_t begin = 0; begin < x.channels; begin += at_once) {
      std::int64_t const some = std::min<std::int64_t>(at_once, x.channels - begin);
      gradient_rows<T> sums{dy.channel_range(begin, some), x.channel_range(begin, some), mean + begin, layout_};
      sum_rows(sums, parts_, group, some, fetch, sum_dy + begin, sum_dy_xmu + begin);
    }
  }

  /// dy and x − center.
  struct terms {
    static constexpr std::size_t inputs = 2, coefficients = 1;
    double const* mean;

    std::array<A, coefficients> operator()(std::int64_t c) const { return {static_cast<A>(mean[c])}; }

    template <class V>
    [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                             std::array<V, coefficients> const& k) const {
      return {in[0], in[1] - k[0]};
    }
  };

  void short_rows(tensor_view<T const> const& dy, tensor_view<T const> const& x, double const* mean, std::int64_t group,
                  double* sum_dy, double* sum_dy_xmu) const {
    short_row_sums<T, terms> const sums{{mean}, {dy, x}};
    sums(parts_.begin(group), parts_.end(group), sum_dy, sum_dy_xmu);
    move_to_means<A>(mean, x.channels, sum_dy, sum_dy_xmu);
  }

  tensor_view<T const> dy_, x_;
  std::span<double const> mean_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail
