#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail {

/// What a mean loses where it is rounded to `A`.
template <class A>
[[nodiscard]] inline double lost_by_rounding(double mean) {
  return mean - static_cast<double>(static_cast<A>(mean));
}

/// Makes Σ dy·(x − mean) of sums about the means rounded to `A`.
template <class A>
inline void move_to_means(double const* mean, std::int64_t channels, double const* sum_dy, double* sum_dy_xmu) {
  for (std::int64_t c = 0; c < channels; ++c)
    sum_dy_xmu[c] = multiply_add(-lost_by_rounding<A>(mean[c]), sum_dy[c], sum_dy_xmu[c]);
}

/// `dy = Σ dy` and `product = Σ dy·(x − center)` of the elements of one piece.
template <class A>
struct gradient_sums {
  A dy, product;
};

template <class T, class A = accumulate_t<T>>
[[nodiscard]] inline gradient_sums<A> sum_gradient_piece(T const* dy, T const* x, A center, std::int64_t n,
                                                         std::int64_t dy_ahead, std::int64_t x_ahead, int fetch) {
  constexpr int lanes = native_lanes<A>;
  using vector = vector_t<A, lanes>;
  if (n < lanes) {
    A first = 0, second = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      A const g = load<1>(dy + i);
      first += g;
      second = multiply_add<A>(g, load<1>(x + i) - center, second);
    }
    return {first, second};
  }

  struct sums {
    vector first{}, second{};
    void add(vector const& g, vector const& d) {
      first += g;
      second = multiply_add(g, d, second);
    }
  } s0, s1, s2, s3;
  vector const c = splat<A, lanes>(center);
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    prefetch_for<4 * lanes>(fetch, dy, i + dy_ahead);
    prefetch_for<4 * lanes>(fetch, x, i + x_ahead);
    auto const [g0, g1] = load_pair<lanes>(dy + i);
    auto const [g2, g3] = load_pair<lanes>(dy + i + 2 * lanes);
    auto const [x0, x1] = load_pair<lanes>(x + i);
    auto const [x2, x3] = load_pair<lanes>(x + i + 2 * lanes);
    s0.add(g0, x0 - c);
    s1.add(g1, x1 - c);
    s2.add(g2, x2 - c);
    s3.add(g3, x3 - c);
  }
  if (i < n) {
    prefetch_for<4 * lanes>(fetch, dy, i + dy_ahead);
    prefetch_for<4 * lanes>(fetch, x, i + x_ahead);
  }
  for (; i + lanes <= n; i += lanes) s0.add(load<lanes>(dy + i), load<lanes>(x + i) - c);
  if (i < n) {
    int const rest = static_cast<int>(n - i);
    s1.add(keep_last<A, lanes>(load<lanes>(dy + n - lanes), rest),
           keep_last<A, lanes>(load<lanes>(x + n - lanes) - c, rest));
  }
  return {sum_lanes<A, lanes>((s0.first + s1.first) + (s2.first + s3.first)),
          sum_lanes<A, lanes>((s0.second + s1.second) + (s2.second + s3.second))};
}

/// Σ dy and Σ dy·(x − mean) of a few channels, row piece by row piece; the sums of a group of pieces at a time. The elements'
/// arithmetic takes the mean rounded to their type; what that loses is added in double.
template <class T>
class gradient_rows {
  using A = accumulate_t<T>;

public:
  static constexpr std::int64_t channels_at_once = 64;

  /// `dy`, `x`: up to channels_at_once channels; `mean` points to theirs.
  gradient_rows(tensor_view<T const> const& dy, tensor_view<T const> const& x, double const* mean, layout of)
      : dy_{dy}, x_{x}, mean_{mean}, contiguous_{of == layout::rows} {}

  /// Adds a piece of channel `c`, and fetches what is read later; `begun`: not the first of its group.
  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    auto const center = static_cast<A>(mean_[c]);
    auto const piece = contiguous_ ? sum_gradient_piece(&dy_(now.sample, c, now.begin), &x_(now.sample, c, now.begin),
                                                        center, now.length, lookahead(dy_, c, now, later),
                                                        lookahead(x_, c, now, later), later.level)
                                   : sum_strided(c, now, center);
    first_[i] = (begun ? first_[i] : 0) + static_cast<double>(piece.dy);
    second_[i] = (begun ? second_[i] : 0) + static_cast<double>(piece.product);
  }

  /// The sums of all channels over the group that was added.
  void finish(std::int64_t, double* sum_dy, double* sum_dy_xmu) const {
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      auto const i = static_cast<std::size_t>(c);
      sum_dy[c] = first_[i];
      sum_dy_xmu[c] = second_[i];
    }
    move_to_means<A>(mean_, x_.channels, sum_dy, sum_dy_xmu);
  }

  static void merge(std::int64_t, std::int64_t, double* a, double* b, double const* a_more, double const* b_more,
                    std::int64_t length) {
    for (std::int64_t c = 0; c < length; ++c) a[c] += a_more[c];
    for (std::int64_t c = 0; c < length; ++c) b[c] += b_more[c];
  }

private:
  [[gnu::noinline]] gradient_sums<A> sum_strided(std::int64_t c, groups::piece const& piece, A center) const {
    std::array<A, static_cast<std::size_t>(row_cut::longest<T>)> dy, x;
    for (std::int64_t s = 0; s < piece.length; ++s) {
      dy[static_cast<std::size_t>(s)] = load<1>(&dy_(piece.sample, c, piece.begin + s));
      x[static_cast<std::size_t>(s)] = load<1>(&x_(piece.sample, c, piece.begin + s));
    }
    return sum_gradient_piece(dy.data(), x.data(), center, piece.length, 0, 0, 0);
  }

  tensor_view<T const> dy_, x_;
  double const* mean_;
  bool contiguous_;
  std::array<double, channels_at_once> first_, second_;
};

} // namespace syncnorm::host::detail
