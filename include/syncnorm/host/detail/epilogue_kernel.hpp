#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/channel_values.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// What the sums of a backward pass through an epilogue are of.
template <class T>
struct epilogue_operands {
  tensor_view<T const> dy, x, residual; ///< residual: without data if there is none
  prepared_mask const* mask = nullptr;  ///< of the positions whose outputs have a gradient; null: all
  std::span<double const> mean, inv_std;
  channel_values gamma, beta;
  accumulate_t<T> slope;
  std::int64_t fold = 1; ///< channels of the views for one of the parameters
};

/// Σ dv and Σ dv·(x − mean) of channels over one group of pieces, where dv = dy·f′(v) is the gradient before the activation;
/// see reduce_channels and backward_kernel.
template <class T>
class epilogue_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  static constexpr std::int64_t rows_at_once = 8;

public:
  epilogue_kernel(epilogue_operands<T> const& of, groups const& parts)
      : of_{of}, parts_{parts}, has_residual_{of.residual.data != nullptr}, layout_{has_residual_
                                                                                        ? common_layout(of.dy, of.x,
                                                                                                        of.residual)
                                                                                        : common_layout(of.dy, of.x)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_xmu) const {
    std::fill_n(sum_dy, length, 0.0);
    std::fill_n(sum_dy_xmu, length, 0.0);
    part const of{first, length, of_};
    if (layout_ != layout::channels) {
      rows(of, group, sum_dy, sum_dy_xmu);
    } else {
      constexpr int lanes = native_lanes<A>;
      length >= lanes ? elements<lanes>(of, group, sum_dy, sum_dy_xmu) : elements<1>(of, group, sum_dy, sum_dy_xmu);
    }
    for (std::int64_t c = 0; c < length; ++c) sum_dy_xmu[c] -= of.lost[static_cast<std::size_t>(c)] * sum_dy[c];
  }

  static void merge(std::int64_t, std::int64_t, double* a, double* b, double const* a_more, double const* b_more,
                    std::int64_t length) {
    for (std::int64_t c = 0; c < length; ++c) a[c] += a_more[c];
    for (std::int64_t c = 0; c < length; ++c) b[c] += b_more[c];
  }

private:
  /// Some channels, their coefficients, and what rounding takes off their means.
  struct part {
    tensor_view<T const> dy, x, residual;
    std::array<A, most> center, scale, shift;
    std::array<double, most> lost;

    part(std::int64_t first, std::int64_t length, epilogue_operands<T> const& of)
        : dy{of.dy.channel_range(first, length)}, x{of.x.channel_range(first, length)}, residual{
                                                                                            of.residual.channel_range(
                                                                                                first, length)} {
      for (std::int64_t i = 0; i < length; ++i) {
        auto const c = static_cast<std::size_t>((first + i) / of.fold), to = static_cast<std::size_t>(i);
        auto const k = make_normalize_coefficients<A>(of.mean[c], of.inv_std[c], of.gamma[c], of.beta[c]);
        center[to] = k.center, scale[to] = k.scale, shift[to] = k.shift;
        lost[to] = of.mean[c] - static_cast<double>(k.center);
      }
    }
  };

  void rows(part const& of, std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const& next) {
      std::uint8_t const* const mask = of_.mask == nullptr ? nullptr : of_.mask->row(now.sample) + now.begin;
      if (mask != nullptr && of_.mask->at(now).counted == 0) return;
      for (std::int64_t c = 0; c < of.x.channels; ++c) {
        row const at{of, now, c, mask, of_.slope, has_residual_};
        sums<1> all{};
        if (layout_ == layout::rows && now.length >= native_lanes<A>) {
          all = at.template sum_vectors<native_lanes<A>>(now.length, lookahead(of.dy, c, now, next),
                                                         lookahead(of.x, c, now, next));
        } else {
          for (std::int64_t s = 0; s < now.length; ++s) at.add(all, s);
        }
        sum_dy[c] += static_cast<double>(all.dy);
        sum_dy_xmu[c] += static_cast<double>(all.product);
      }
    });
  }

  template <int L>
  struct sums {
    vector_t<A, L> dy, product;
  };

  /// One piece of one channel.
  struct row {
    T const *dy, *x, *residual;
    std::int64_t dy_step, x_step, residual_step;
    std::uint8_t const* mask;
    A center, scale, shift, slope;

    row(part const& of, groups::piece const& now, std::int64_t c, std::uint8_t const* counted, A negative_slope,
        bool has_residual)
        : dy{&of.dy(now.sample, c, now.begin)}, x{&of.x(now.sample, c, now.begin)},
          residual{has_residual ? &of.residual(now.sample, c, now.begin) : nullptr}, dy_step{of.dy.stride_s},
          x_step{of.x.stride_s}, residual_step{of.residual.stride_s}, mask{counted},
          center{of.center[static_cast<std::size_t>(c)]}, scale{of.scale[static_cast<std::size_t>(c)]},
          shift{of.shift[static_cast<std::size_t>(c)]}, slope{negative_slope} {}

    void add(sums<1>& to, std::int64_t s) const {
      if (mask != nullptr && mask[s] == 0) return;
      A const d = load<1>(x + s * x_step) - center;
      A v = d * scale + shift;
      if (residual != nullptr) v += load<1>(residual + s * residual_step);
      A const g = activation_gradient(v, load<1>(dy + s * dy_step), slope);
      to.dy += g;
      to.product += g * d;
    }

    /// What vector `i` of contiguous elements adds.
    template <int L>
    [[nodiscard]] sums<L> at(std::int64_t i) const {
      using vector = vector_t<A, L>;
      vector const d = load<L>(x + i) - splat<A, L>(center);
      vector v = d * splat<A, L>(scale) + splat<A, L>(shift);
      if (residual != nullptr) v += load<L>(residual + i);
      vector const g = activation_gradient(v, load<L>(dy + i), slope);
      vector const product = g * d;
      if (mask == nullptr) return {g, product};
      auto const counted = counted_lanes<A, L>(mask + i);
      vector const zero{};
      return {counted ? g : zero, counted ? product : zero};
    }

    template <int L>
    [[nodiscard]] sums<1> sum_vectors(std::int64_t n, std::int64_t dy_ahead, std::int64_t x_ahead) const {
      std::array<sums<L>, 4> of{};
      auto const add_to = [](sums<L>& to, sums<L> const& more) {
        to.dy += more.dy;
        to.product += more.product;
      };
      std::int64_t i = 0;
      for (; i + 4 * L <= n; i += 4 * L) {
        prefetch<4 * L>(dy, i + dy_ahead);
        prefetch<4 * L>(x, i + x_ahead);
        if (residual != nullptr) prefetch<4 * L>(residual, i + x_ahead);
        add_to(of[0], at<L>(i));
        add_to(of[1], at<L>(i + L));
        add_to(of[2], at<L>(i + 2 * L));
        add_to(of[3], at<L>(i + 3 * L));
      }
      for (; i + L <= n; i += L) add_to(of[0], at<L>(i));
      if (i < n) {
        auto const last = at<L>(n - L);
        auto const rest = static_cast<int>(n - i);
        add_to(of[1], {keep_last<A, L>(last.dy, rest), keep_last<A, L>(last.product, rest)});
      }
      return {sum_lanes<A, L>((of[0].dy + of[1].dy) + (of[2].dy + of[3].dy)),
              sum_lanes<A, L>((of[0].product + of[1].product) + (of[2].product + of[3].product))};
    }
  };

  /// Contiguous channels: the sums of some positions at a time go into double.
  template <int L>
  void elements(part const& of, std::int64_t group, double* sum_dy, double* sum_dy_xmu) const {
    using vector = vector_t<A, L>;
    lane_slots<L> const slots{of.x.channels};
    std::array<double, most> first, second;
    std::fill_n(first.data(), slots.size(), 0.0);
    std::fill_n(second.data(), slots.size(), 0.0);
    struct position {
      T const *dy, *x, *residual;
    };
    std::array<position, static_cast<std::size_t>(rows_at_once)> positions;
    std::size_t waiting = 0;
    auto const flush = [&] {
      slots.for_each([&](std::int64_t slot, std::int64_t c) {
        auto const i = static_cast<std::size_t>(slot), from = static_cast<std::size_t>(c);
        vector const center = load<L>(&of.center[from]), scale = load<L>(&of.scale[from]);
        vector const shift = load<L>(&of.shift[from]);
        vector a{}, b{};
        for (std::size_t r = 0; r < waiting; ++r) {
          auto const& at = positions[r];
          vector const d = load<L>(at.x + c) - center;
          vector v = d * scale + shift;
          if (has_residual_) v += load<L>(at.residual + c);
          vector const g = activation_gradient(v, load<L>(at.dy + c), of_.slope);
          a += g;
          b += g * d;
        }
        add_to_doubles<A, L>(&first[i], a);
        add_to_doubles<A, L>(&second[i], b);
      });
      waiting = 0;
    };
    parts_.for_each_piece(group, [&](groups::piece const& now, groups::piece const&) {
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
    slots.for_each([&](std::int64_t slot, std::int64_t c) {
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
