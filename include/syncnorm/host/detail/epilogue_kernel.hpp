#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
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
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  static constexpr std::int64_t rows_at_once = 8;

public:
  epilogue_kernel(epilogue_operands<T> const& of, groups const& parts)
      : of_{of}, parts_{parts}, has_residual_{of.residual.data != nullptr}, layout_{common_layout(of)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_xmu) const {
    if (layout_ == layout::rows && of_.mask == nullptr && are_short_rows(of_.x.spatial))
      return has_residual_ ? short_rows<true>(first, length, group, sum_dy, sum_dy_xmu)
                           : short_rows<false>(first, length, group, sum_dy, sum_dy_xmu);
    if (layout_ != layout::channels) return rows(first, length, group, sum_dy, sum_dy_xmu);
    part const of{of_, first, length};
    constexpr int lanes = native_lanes<A>;
    length >= lanes ? elements<lanes>(of, group, sum_dy, sum_dy_xmu) : elements<1>(of, group, sum_dy, sum_dy_xmu);
    for (std::int64_t c = 0; c < length; ++c)
      sum_dy_xmu[c] = multiply_add(-of.lost[static_cast<std::size_t>(c)], sum_dy[c], sum_dy_xmu[c]);
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    gradient_rows<T>::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  using part = epilogue_part<T, most>;

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
      auto const c = static_cast<std::size_t>(first + i);
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
  void short_rows(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                  double* sum_dy_xmu) const {
    std::array<tensor_view<T const>, terms<Residual>::inputs> in{of_.dy.channel_range(first, length),
                                                                 of_.x.channel_range(first, length)};
    if constexpr (Residual) in[2] = of_.residual.channel_range(first, length);
    short_row_sums<T, terms<Residual>> const sums{{of_, first}, in};
    sums(parts_.begin(group), parts_.end(group), sum_dy, sum_dy_xmu);
    move_to_means<A>(of_.mean.data() + first, length, sum_dy, sum_dy_xmu);
  }

  /// Contiguous channels: the sums of some positions at a time go into double.
  template <int L>
  void elements(part const& of, std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const places{of.x.channels};
    std::array<double, most> first, second;
    std::fill_n(first.data(), places.size(), 0.0);
    std::fill_n(second.data(), places.size(), 0.0);
    struct position {
      T const *dy, *x, *residual;
    };
    std::array<position, static_cast<std::size_t>(rows_at_once)> positions;
    std::size_t waiting = 0;
    std::int64_t const ahead = positions_ahead<T>(2 * of.x.channels, rows_at_once);
    auto const flush = [&] {
      bool const residual = has_residual_;
      auto const slope = of_.slope;
      places.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot), from = static_cast<std::size_t>(c);
        vector const center = load<L>(&of.center[from]), scale = load<L>(&of.scale[from]);
        vector const shift = load<L>(&of.shift[from]);
        vector a{}, b{};
        for (std::size_t r = 0; r < waiting; ++r) {
          auto const& at = positions[r];
          prefetch<L, 2>(at.dy + c, ahead * of.dy.stride_s);
          prefetch<L, 2>(at.x + c, ahead * of.x.stride_s);
          if (residual) prefetch<L, 2>(at.residual + c, ahead * of.residual.stride_s);
          vector const d = load<L>(at.x + c) - center;
          vector v = multiply_add(d, scale, shift);
          if (residual) v += load<L>(at.residual + c);
          vector const g = activation_gradient(v, load<L>(at.dy + c), slope);
          a += g;
          b = multiply_add(g, d, b);
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now) {
      std::uint8_t const* const mask = of_.mask == nullptr ? nullptr : of_.mask->row(now.sample) + now.begin;
      for (std::int64_t s = 0; s < now.length; ++s) {
        if (mask != nullptr && mask[s] == 0) continue;
        std::int64_t const at = now.begin + s;
        positions[waiting++] = {&of.dy(now.sample, 0, at), &of.x(now.sample, 0, at),
                                has_residual_ ? &of.residual(now.sample, 0, at) : nullptr};
        if (waiting == positions.size()) flush();
      }
    });
    flush();
    places.for_each([&](std::int64_t slot, std::int64_t c) {
      std::copy_n(first.data() + slot, L, sum_dy + c);
      std::copy_n(second.data() + slot, L, sum_dy_xmu + c);
    });
  }

  epilogue_operands<T> of_;
  groups parts_;
  bool has_residual_;
  layout layout_;
};

} // namespace syncnorm::host::detail
