#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// Batch norm of one concatenated batch `[N, C, S]` with all that a pass may do besides, by its definition in long double:
/// y = f(gamma·(x − mean)·inv_std + beta + residual), the statistics of the positions that count. It shares no code with the
/// library.
struct epilogue_oracle {
  std::int64_t samples, channels, spatial;
  std::vector<long double> x, gamma, beta, residual; ///< no residual: empty
  std::vector<unsigned char> mask;                   ///< `[N, S]`; none: empty
  bool zeroes = false;                               ///< outputs that do not count are 0
  long double slope = 1, eps = 1e-3L;
  bool unbiased = false;    ///< the variance that normalizes
  bool exponential = false; ///< below 0, f(v) is slope·(eᵛ − 1)

  std::int64_t count = 0;
  bool constant = false;
  std::vector<long double> mean{}, m2{}, inv_std{}, y{};

  /// Computes the statistics and y.
  void forward() {
    auto const c_count = static_cast<std::size_t>(channels);
    mean.assign(c_count, 0), m2 = inv_std = mean;
    count = 0;
    for (std::int64_t i = 0; i < samples * spatial; ++i)
      count += mask.empty() || mask[static_cast<std::size_t>(i)] != 0;
    each([&](std::size_t c, std::size_t i, bool counts) {
      if (counts) mean[c] += x[i] / static_cast<long double>(count);
    });
    each([&](std::size_t c, std::size_t i, bool counts) {
      if (counts) m2[c] += (x[i] - mean[c]) * (x[i] - mean[c]);
    });
    for (std::size_t c = 0; c < c_count; ++c) inv_std[c] = count == 0 ? 0 : 1 / std::sqrt(m2[c] / of_variance() + eps);
    write();
  }

  /// Takes mean and inv_std as they are for constants, and computes y.
  void constant_statistics() {
    constant = true;
    write();
  }

  /// What is activated.
  [[nodiscard]] long double before(std::size_t c, std::size_t i) const {
    return (x[i] - mean[c]) * inv_std[c] * gamma[c] + beta[c] + (residual.empty() ? 0 : residual[i]);
  }

  /// Calls f(i) for each element whose value is so near to the kink of the activation.
  template <class F>
  void for_each_near_kink(long double distance, F const& f) const {
    each([&](std::size_t c, std::size_t i, bool) {
      if (std::abs(before(c, i)) < distance) f(i);
    });
  }

  struct gradients {
    std::vector<long double> dx, dresidual, sum_dy, sum_dy_xmu, gamma, beta;
  };

  /// Gradients of Σ dy·y, those of gamma and beta as far as samples [first, last) contribute to them.
  [[nodiscard]] gradients backward(std::vector<long double> const& dy, std::int64_t first, std::int64_t last) const {
    auto const c_count = static_cast<std::size_t>(channels);
    gradients g;
    g.sum_dy.assign(c_count, 0), g.sum_dy_xmu = g.gamma = g.beta = g.sum_dy;
    g.dx.assign(x.size(), 0), g.dresidual = g.dx;
    each([&](std::size_t c, std::size_t i, bool counts) {
      long double const dv = zeroes && !counts ? 0 : dy[i] * derivative(before(c, i));
      long double const product = zeroes && !counts ? 0 : dv * (x[i] - mean[c]);
      g.dresidual[i] = dv;
      g.sum_dy[c] += dv;
      g.sum_dy_xmu[c] += product;
      auto const n = static_cast<std::int64_t>(i) / (channels * spatial);
      if (n < first || n >= last) return;
      g.beta[c] += dv;
      g.gamma[c] += product * inv_std[c];
    });
    auto const all = static_cast<long double>(std::max<std::int64_t>(count, 1));
    each([&](std::size_t c, std::size_t i, bool counts) {
      if (zeroes && !counts) return;
      long double const through = counts && !constant ? g.sum_dy[c] / all + (x[i] - mean[c]) * inv_std[c] * inv_std[c] *
                                                                                g.sum_dy_xmu[c] / of_variance()
                                                      : 0;
      g.dx[i] = gamma[c] * inv_std[c] * (g.dresidual[i] - through);
    });
    return g;
  }

private:
  [[nodiscard]] long double derivative(long double v) const {
    return v > 0 ? 1 : slope * (exponential ? std::exp(v) : 1);
  }
  [[nodiscard]] long double of_variance() const { return static_cast<long double>(unbiased ? count - 1 : count); }
  void write() {
    y.assign(x.size(), 0);
    each([&](std::size_t c, std::size_t i, bool counts) {
      long double const v = before(c, i);
      y[i] = zeroes && !counts ? 0 : v > 0 ? v : slope * (exponential ? std::expm1(v) : v);
    });
  }

  template <class F>
  void each(F const& f) const {
    std::size_t i = 0;
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c)
        for (std::int64_t s = 0; s < spatial; ++s, ++i)
          f(c, i, mask.empty() || mask[static_cast<std::size_t>(n * spatial + s)] != 0);
  }
};

} // namespace test
