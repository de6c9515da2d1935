#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/epilogue_ops.hpp>
#include <syncnorm/host/detail/gradient_rows.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
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

/// What is contiguous in all operands.
template <class T>
[[nodiscard]] layout common_layout(epilogue_operands<T> const& of) {
  return of.residual.data == nullptr ? common_layout(of.dy, of.x) : common_layout(of.dy, of.x, of.residual);
}

/// Σ dv and Σ dv·(x − mean) of a few channels, row piece by row piece, where dv = dy·f′(v) is the gradient before the
/// activation; see gradient_rows.
template <class T>
class epilogue_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;

  /// Channels [first, first + length) of the operands, up to channels_at_once.
  epilogue_rows(epilogue_operands<T> const& of, std::int64_t first, std::int64_t length)
      : dy_{of.dy.channel_range(first, length)}, x_{of.x.channel_range(first, length)},
        residual_{of.residual.channel_range(first, length)}, mask_{of.mask}, slope_{of.slope},
        has_residual_{of.residual.data != nullptr}, contiguous_{common_layout(of) == layout::rows} {
    for (std::int64_t i = 0; i < length; ++i) {
      auto const c = static_cast<std::size_t>((first + i) / of.fold), to = static_cast<std::size_t>(i);
      auto const k = make_normalize_coefficients<A>(of.mean[c], of.inv_std[c], of.gamma[c], of.beta[c]);
      center_[to] = k.center, scale_[to] = k.scale, shift_[to] = k.shift;
      lost_[to] = lost_by_rounding<A>(of.mean[c]);
    }
  }

  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) first_[i] = second_[i] = 0;
    if (mask_ != nullptr && mask_->at(now).counted == 0) return;
    sums<1> const all = contiguous_
                            ? sum(row_of(c, now, &dy_(now.sample, c, now.begin), &x_(now.sample, c, now.begin),
                                         has_residual_ ? &residual_(now.sample, c, now.begin) : nullptr),
                                  now.length, lookahead(dy_, c, now, later), lookahead(x_, c, now, later), later.level)
                            : sum_copies(c, now);
    first_[i] += static_cast<double>(all.dy);
    second_[i] += static_cast<double>(all.product);
  }

  void finish(std::int64_t, double* sum_dy, double* sum_dy_xmu) const {
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      auto const i = static_cast<std::size_t>(c);
      sum_dy[c] = first_[i];
      sum_dy_xmu[c] = multiply_add(-lost_[i], first_[i], second_[i]);
    }
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    gradient_rows<T>::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  /// The gradient of v, and x − center.
  template <int L>
  struct terms {
    vector_t<A, L> dy, d;
  };

  template <int L>
  struct sums {
    vector_t<A, L> dy, product;

    [[gnu::always_inline]] void add(terms<L> const& more) {
      dy += more.dy;
      product = multiply_add(more.dy, more.d, product);
    }
  };

  /// One piece of one channel, of elements of type `E`.
  template <class E>
  struct row {
    E const *dy, *x, *residual;
    std::uint8_t const* mask;
    A center, scale, shift, slope;

    void add(sums<1>& to, std::int64_t s) const {
      if (mask != nullptr && mask[s] == 0) return;
      A const d = load<1>(x + s) - center;
      A v = multiply_add(d, scale, shift);
      if (residual != nullptr) v += load<1>(residual + s);
      A const g = activation_gradient(v, load<1>(dy + s), slope);
      to.add({g, d});
    }

    /// What vector `i` adds.
    template <int L>
    [[nodiscard, gnu::always_inline]] terms<L> at(std::int64_t i) const {
      using vector = vector_t<A, L>;
      vector const d = load<L>(x + i) - splat<A, L>(center);
      vector v = multiply_add(d, splat<A, L>(scale), splat<A, L>(shift));
      if (residual != nullptr) v += load<L>(residual + i);
      vector const g = activation_gradient(v, load<L>(dy + i), slope);
      if (mask == nullptr) return {g, d};
      auto const counted = counted_lanes<A, L>(mask + i);
      vector const zero{};
      return {counted ? g : zero, counted ? d : zero};
    }

    /// What the two vectors from `i` on add.
    template <int L>
    [[gnu::always_inline]] void add_two(sums<L>& to0, sums<L>& to1, std::int64_t i) const {
      if constexpr (weaves<E, L>) {
        using vector = vector_t<A, L>;
        vector const p = splat<A, L>(center), k = splat<A, L>(scale), b = splat<A, L>(shift), zero{};
        auto const [x0, x1] = load_pair<L>(x + i);
        vector d0 = x0 - p, d1 = x1 - p;
        vector v0 = multiply_add(d0, k, b), v1 = multiply_add(d1, k, b);
        if (residual != nullptr) {
          auto const [r0, r1] = load_pair<L>(residual + i);
          v0 += r0;
          v1 += r1;
        }
        auto const [dy0, dy1] = load_pair<L>(dy + i);
        vector g0 = activation_gradient(v0, dy0, slope), g1 = activation_gradient(v1, dy1, slope);
        if (mask != nullptr) {
          auto const counted = counted_pair<E, L>(mask + i);
          g0 = counted[0] ? g0 : zero, d0 = counted[0] ? d0 : zero;
          g1 = counted[1] ? g1 : zero, d1 = counted[1] ? d1 : zero;
        }
        to0.add({g0, d0});
        to1.add({g1, d1});
      } else {
        to0.add(at<L>(i));
        to1.add(at<L>(i + L));
      }
    }

    template <int L>
    [[nodiscard]] sums<1> sum_vectors(std::int64_t n, std::int64_t dy_ahead, std::int64_t x_ahead, int fetch) const {
      std::array<sums<L>, 4> of{};
      std::int64_t i = 0;
      for (; i + 4 * L <= n; i += 4 * L) {
        prefetch_for<4 * L>(fetch, dy, i + dy_ahead);
        prefetch_for<4 * L>(fetch, x, i + x_ahead);
        if (residual != nullptr) prefetch_for<4 * L>(fetch, residual, i + x_ahead);
        add_two<L>(of[0], of[1], i);
        add_two<L>(of[2], of[3], i + 2 * L);
      }
      for (; i + L <= n; i += L) of[0].add(at<L>(i));
      if (i < n) {
        auto const last = at<L>(n - L);
        auto const rest = static_cast<int>(n - i);
        of[1].add({keep_last<A, L>(last.dy, rest), keep_last<A, L>(last.d, rest)});
      }
      return {sum_lanes<A, L>((of[0].dy + of[1].dy) + (of[2].dy + of[3].dy)),
              sum_lanes<A, L>((of[0].product + of[1].product) + (of[2].product + of[3].product))};
    }
  };

  template <class E>
  [[nodiscard]] row<E> row_of(std::int64_t c, groups::piece const& now, E const* dy, E const* x,
                              E const* residual) const {
    auto const i = static_cast<std::size_t>(c);
    std::uint8_t const* const mask = mask_ == nullptr ? nullptr : mask_->row(now.sample) + now.begin;
    return {dy, x, residual, mask, center_[i], scale_[i], shift_[i], slope_};
  }

  template <class E>
  [[nodiscard]] static sums<1> sum(row<E> const& of, std::int64_t n, std::int64_t dy_ahead, std::int64_t x_ahead,
                                   int fetch) {
    constexpr int lanes = native_lanes<A>;
    if (n >= lanes) return of.template sum_vectors<lanes>(n, dy_ahead, x_ahead, fetch);
    sums<1> all{};
    for (std::int64_t s = 0; s < n; ++s) of.add(all, s);
    return all;
  }

  [[nodiscard, gnu::noinline]] sums<1> sum_copies(std::int64_t c, groups::piece const& now) const {
    std::array<std::array<A, static_cast<std::size_t>(row_cut::longest<T>)>, 3> copies;
    auto const copy = [&](tensor_view<T const> const& from, std::size_t to) {
      for (std::int64_t s = 0; s < now.length; ++s)
        copies[to][static_cast<std::size_t>(s)] = load<1>(&from(now.sample, c, now.begin + s));
      return static_cast<A const*>(copies[to].data());
    };
    A const *const dy = copy(dy_, 0), *const x = copy(x_, 1);
    return sum(row_of(c, now, dy, x, has_residual_ ? copy(residual_, 2) : nullptr), now.length, 0, 0, 0);
  }

  static constexpr auto most = static_cast<std::size_t>(channels_at_once);

  tensor_view<T const> dy_, x_, residual_;
  prepared_mask const* mask_;
  A slope_;
  bool has_residual_, contiguous_;
  std::array<A, most> center_, scale_, shift_;
  std::array<double, most> lost_; ///< what rounding takes off the means
  std::array<double, most> first_, second_;
};

} // namespace syncnorm::host::detail
