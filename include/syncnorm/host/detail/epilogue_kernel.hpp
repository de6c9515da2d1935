#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/columns.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/epilogue_rows.hpp>
#include <syncnorm/host/detail/gradient_rows.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// The sums of epilogue_rows over one group of pieces; see reduce_channels and backward_kernel.
template <class T>
class epilogue_kernel {
  using A = accumulate_t<T>;

public:
  epilogue_kernel(epilogue_operands<T> const& of, groups const& parts)
      : of_{of}, parts_{parts}, has_residual_{of.residual.data != nullptr}, layout_{common_layout(of)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_xmu) const {
    if (layout_ == layout::rows && of_.mask == nullptr && are_short_rows(of_.x.spatial))
      return has_residual_ ? short_rows<true>(first, length, group, sum_dy, sum_dy_xmu)
                           : short_rows<false>(first, length, group, sum_dy, sum_dy_xmu);
    if (layout_ != layout::channels) return rows(first, length, group, sum_dy, sum_dy_xmu);
    has_residual_ ? channels<true>(first, length, group, sum_dy, sum_dy_xmu)
                  : channels<false>(first, length, group, sum_dy, sum_dy_xmu);
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    gradient_rows<T>::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  void rows(std::int64_t begin, std::int64_t length, std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    constexpr auto at_once = epilogue_rows<T>::channels_at_once;
    fetching const fetch = fetching::of(of_.x, parts_, of_.residual.data == nullptr ? 2 : 3);
    for (std::int64_t done = 0; done < length; done += at_once) {
      std::int64_t const some = std::min(at_once, length - done);
      epilogue_rows<T> sums{of_, begin + done, some};
      sum_rows(sums, parts_, group, some, fetch, sum_dy + done, sum_dy_xmu + done);
    }
  }

  /// dv and x − center.
  template <bool Residual>
  struct terms {
    static constexpr std::size_t inputs = Residual ? 3 : 2, coefficients = 3;
    epilogue_operands<T> const& of;
    std::int64_t first;

    std::array<A, coefficients> operator()(std::int64_t i) const {
      auto const c = static_cast<std::size_t>((first + i) / of.fold);
      auto const k = make_normalize_coefficients<A>(of.mean[c], of.inv_std[c], of.gamma[c], of.beta[c]);
      return {k.center, k.scale, k.shift};
    }

    template <class V>
    [[nodiscard, gnu::always_inline]] std::array<V, 2> apply(std::array<V, inputs> const& in,
                                                             std::array<V, coefficients> const& k) const {
      V const d = in[1] - k[0];
      V v = multiply_add(d, k[1], k[2]);
      if constexpr (Residual) v += in[2];
      V const g = activation_gradient(v, in[0], of.slope);
      return {g, d};
    }
  };

  template <bool Residual>
  [[nodiscard]] auto inputs_of(std::int64_t first, std::int64_t length) const {
    std::array<tensor_view<T const>, terms<Residual>::inputs> in{of_.dy.channel_range(first, length),
                                                                 of_.x.channel_range(first, length)};
    if constexpr (Residual) in[2] = of_.residual.channel_range(first, length);
    return in;
  }

  template <bool Residual>
  void short_rows(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                  double* sum_dy_xmu) const {
    short_row_sums<T, terms<Residual>> const sums{{of_, first}, inputs_of<Residual>(first, length)};
    sums(parts_.begin(group), parts_.end(group), sum_dy, sum_dy_xmu);
    move_to_means<A>(of_.mean.data() + first, length, sum_dy, sum_dy_xmu);
  }

  template <bool Residual>
  void channels(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    sum_channels<T>(terms<Residual>{of_, first}, inputs_of<Residual>(first, length), parts_, of_.mask, group, sum_dy,
                    sum_dy_xmu);
    for (std::int64_t i = 0; i < length; ++i)
      sum_dy_xmu[i] = multiply_add(-lost_by_rounding<A>(of_.mean[static_cast<std::size_t>((first + i) / of_.fold)]),
                                   sum_dy[i], sum_dy_xmu[i]);
  }

  epilogue_operands<T> of_;
  groups parts_;
  bool has_residual_;
  layout layout_;
};

} // namespace syncnorm::host::detail
