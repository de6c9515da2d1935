#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// Batch norm of one concatenated batch `[N, C, S]`, dense and in that order, by two passes in long double. It shares no
/// code with the library.
struct batch_norm_oracle {
  std::int64_t samples, channels, spatial;
  long double eps, lost;                       // the variance that normalizes divides by N·S − lost
  std::vector<long double> mean, var, inv_std; // `[C]`, var biased

  template <class T>
  batch_norm_oracle(std::vector<T> const& x, std::int64_t n, std::int64_t c, std::int64_t s, double epsilon,
                    bool unbiased = false)
      : samples{n}, channels{c}, spatial{s}, eps{epsilon}, lost{unbiased ? 1.0L : 0.0L},
        mean(static_cast<std::size_t>(c)), var(mean), inv_std(mean) {
    long double const count = static_cast<long double>(n * s);
    each([&](std::size_t ch, std::size_t i) { mean[ch] += static_cast<long double>(x[i]); });
    for (auto& sum : mean) sum /= count;
    each([&](std::size_t ch, std::size_t i) {
      long double const d = static_cast<long double>(x[i]) - mean[ch];
      var[ch] += d * d;
    });
    for (std::size_t ch = 0; ch < mean.size(); ++ch) {
      inv_std[ch] = 1 / std::sqrt(var[ch] / (count - lost) + eps);
      var[ch] /= count;
    }
  }

  /// y = gamma·(x − mean)·inv_std + beta; empty gamma and beta stand for 1 and 0.
  template <class T, class P>
  [[nodiscard]] std::vector<long double> forward(std::vector<T> const& x, std::vector<P> const& gamma,
                                                 std::vector<P> const& beta) const {
    std::vector<long double> y(x.size());
    each([&](std::size_t ch, std::size_t i) {
      long double const normalized = (static_cast<long double>(x[i]) - mean[ch]) * inv_std[ch];
      y[i] = normalized * at(gamma, ch, 1) + at(beta, ch, 0);
    });
    return y;
  }

  struct gradients {
    std::vector<long double> dx, gamma, beta;
  };

  /// Gradients of Σ dy·y over the whole batch.
  template <class T, class P>
  [[nodiscard]] gradients backward(std::vector<T> const& x, std::vector<T> const& dy,
                                   std::vector<P> const& gamma) const {
    auto sums = parameter_gradients(x, dy, 0, samples);
    long double const count = static_cast<long double>(samples * spatial);
    std::vector<long double> mean_dy, slope; // of the terms by which the statistics depend on x
    for (std::size_t ch = 0; ch < mean.size(); ++ch) {
      mean_dy.push_back(sums.beta[ch] / count);
      slope.push_back(inv_std[ch] * sums.gamma[ch] / (count - lost));
    }
    sums.dx.resize(x.size());
    each([&](std::size_t ch, std::size_t i) {
      long double const centered = static_cast<long double>(x[i]) - mean[ch];
      sums.dx[i] =
          at(gamma, ch, 1) * inv_std[ch] * (static_cast<long double>(dy[i]) - mean_dy[ch] - centered * slope[ch]);
    });
    return sums;
  }

  /// The part of the gradients of gamma and beta that samples [first, last) contribute.
  template <class T>
  [[nodiscard]] gradients parameter_gradients(std::vector<T> const& x, std::vector<T> const& dy, std::int64_t first,
                                              std::int64_t last) const {
    gradients sums{{}, std::vector<long double>(mean.size()), std::vector<long double>(mean.size())};
    each(first, last, [&](std::size_t ch, std::size_t i) {
      sums.gamma[ch] += static_cast<long double>(dy[i]) * (static_cast<long double>(x[i]) - mean[ch]) * inv_std[ch];
      sums.beta[ch] += static_cast<long double>(dy[i]);
    });
    return sums;
  }

private:
  template <class F>
  void each(F const& f) const {
    each(0, samples, f);
  }
  template <class F>
  void each(std::int64_t first, std::int64_t last, F const& f) const {
    auto i = static_cast<std::size_t>(first * channels * spatial);
    for (std::int64_t n = first; n < last; ++n)
      for (std::size_t ch = 0; ch < mean.size(); ++ch)
        for (std::int64_t s = 0; s < spatial; ++s) f(ch, i++);
  }

  template <class P>
  static long double at(std::vector<P> const& values, std::size_t ch, int otherwise) {
    return values.empty() ? static_cast<long double>(otherwise) : static_cast<long double>(values[ch]);
  }
};

} // namespace test
