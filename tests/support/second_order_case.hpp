#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

#include <ops/grid_case.hpp>
#include <support/epilogue_oracle.hpp>

namespace test {

/// A loss of the results of backward passes, over the whole batch, by the oracle in long double:
///
///     L = Σ u·dx + Σ v·dresidual + Σ over ranks of a_r·(the gradient of gamma on rank r) + b_r·(that of beta)
struct second_order_case {
  std::vector<std::int64_t> shares; // samples of each rank
  std::int64_t channels, spatial = 3;
  double eps = 0.1, slope = 1;
  bool has_gamma = true, has_u = true, has_ab = true, has_residual = false, zeroes = false, unbiased = false;
  std::int64_t batches = 1;                                     // of each rank
  std::vector<unsigned char> mask{};                            // `[N, S]`; empty: none
  std::vector<double> x, dy, u, v, residual, gamma, beta, a, b; // `[N, C, S]`, `[C]`, and `[P, C]`

  explicit second_order_case(std::vector<std::int64_t> const& samples_of_ranks, std::int64_t channels_ = 2)
      : shares{samples_of_ranks}, channels{channels_} {
    auto const fill = [](std::uint64_t stream, std::int64_t size, double mean) {
      std::vector<double> values(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + noise(stream, i);
      return values;
    };
    auto const size = samples() * channels * spatial, ranks = std::ssize(shares);
    x = fill(1, size, 0.5), dy = fill(2, size, 0.25), u = fill(3, size, -0.25), gamma = fill(4, channels, 1.5);
    a = fill(5, ranks * channels, 0), b = fill(6, ranks * channels, 0), beta = fill(7, channels, 0.25);
    v = fill(8, size, 0.5), residual = fill(9, size, 0);
  }

  /// Masks positions, and keeps gradients from where a difference would cross the kink of the activation.
  void with_epilogue(double negative_slope, bool adds, bool masks, bool zero) {
    slope = negative_slope, has_residual = adds, zeroes = zero;
    for (std::int64_t i = 0; masks && i < samples() * spatial; ++i) mask.push_back(i % 4 != 1 && i % 7 != 2);
    if (slope != 1) oracle().for_each_near_kink(0.02L, [&](std::size_t i) { dy[i] = 0; });
  }

  [[nodiscard]] std::int64_t samples() const { return std::accumulate(shares.begin(), shares.end(), std::int64_t{0}); }
  [[nodiscard]] std::int64_t first_of(std::size_t rank) const {
    return std::accumulate(shares.begin(), shares.begin() + static_cast<std::ptrdiff_t>(rank), std::int64_t{0});
  }

  [[nodiscard]] epilogue_oracle oracle() const {
    auto const wide = [](std::vector<double> const& values) {
      return std::vector<long double>(values.begin(), values.end());
    };
    auto const length = static_cast<std::size_t>(channels);
    epilogue_oracle made{samples(),
                         channels,
                         spatial,
                         wide(x),
                         has_gamma ? wide(gamma) : std::vector<long double>(length, 1),
                         has_gamma ? wide(beta) : std::vector<long double>(length, 0),
                         has_residual ? wide(residual) : std::vector<long double>{},
                         mask,
                         zeroes,
                         slope,
                         eps,
                         unbiased};
    made.forward();
    return made;
  }

  /// L where gamma has the value it has, of `rank` alone where that is given: the part of L that this rank computes.
  [[nodiscard]] long double loss(int rank = -1) const {
    auto const of_batch = oracle();
    std::vector<long double> const wide_dy(dy.begin(), dy.end());
    long double sum = 0;
    auto const of_sample = static_cast<std::size_t>(channels * spatial);
    for (std::size_t r = 0; r < shares.size(); ++r) {
      if (rank >= 0 && static_cast<int>(r) != rank) continue;
      auto const first = first_of(r), last = first + shares[r];
      auto const gradients = of_batch.backward(wide_dy, first, last);
      for (auto i = of_sample * static_cast<std::size_t>(first); i < of_sample * static_cast<std::size_t>(last); ++i) {
        if (has_u) sum += u[i] * gradients.dx[i];
        if (has_residual) sum += v[i] * gradients.dresidual[i];
      }
      if (!has_ab) continue;
      for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
        auto const i = r * static_cast<std::size_t>(channels) + c;
        sum += a[i] * gradients.gamma[c] + b[i] * gradients.beta[c];
      }
    }
    return sum;
  }

  /// ∂L/∂value, by central differences of order 4 in long double.
  [[nodiscard]] double slope_of(double& value, int rank = -1) const {
    double const kept = value, h = 1e-3;
    auto const at = [&](int steps) {
      value = kept + steps * h;
      return loss(rank);
    };
    long double const difference = 8 * (at(1) - at(-1)) - (at(2) - at(-2));
    value = kept;
    return static_cast<double>(difference / (12 * static_cast<long double>(h)));
  }
};

} // namespace test
