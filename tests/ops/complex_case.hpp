#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>

#include <ops/grid.hpp>
#include <ops/grid_case.hpp>
#include <support/noise.hpp>

namespace test {

using wide_complex = std::complex<long double>;

/// Batch norm of one batch of complex numbers `[N, C, S]`, dense and in that order, of whose positions some count, by two passes in long
/// double. It shares no code with the library.
struct complex_oracle {
  std::int64_t samples, channels, spatial;
  std::vector<std::uint8_t> counts; // `[N, S]`
  bool zeroes;                      // outputs of the other positions
  long double eps, lost;            // the variance that normalizes divides by n − lost
  std::int64_t n = 0;
  std::vector<wide_complex> mean{};
  std::vector<long double> var{}, inv_std{}; // var biased

  void learn(std::vector<wide_complex> const& x) {
    n = std::ranges::count(counts, 1);
    mean.assign(static_cast<std::size_t>(channels), {});
    var.assign(mean.size(), 0);
    inv_std.assign(mean.size(), 0);
    auto const count = static_cast<long double>(n);
    each([&](std::size_t c, std::size_t i, bool counted) {
      if (counted) mean[c] += x[i];
    });
    for (auto& sum : mean) sum /= count;
    each([&](std::size_t c, std::size_t i, bool counted) {
      if (counted) var[c] += std::norm(x[i] - mean[c]);
    });
    for (std::size_t c = 0; c < var.size(); ++c) {
      inv_std[c] = 1 / std::sqrt(var[c] / (count - lost) + eps);
      var[c] /= count;
    }
  }

  [[nodiscard]] std::vector<wide_complex> forward(std::vector<wide_complex> const& x,
                                                  std::vector<wide_complex> const& gamma,
                                                  std::vector<wide_complex> const& beta) const {
    std::vector<wide_complex> y(x.size());
    each([&](std::size_t c, std::size_t i, bool counted) {
      if (counted || !zeroes) y[i] = gamma[c] * inv_std[c] * (x[i] - mean[c]) + beta[c];
    });
    return y;
  }

  struct gradients {
    std::vector<wide_complex> dx, beta, gamma;
  };

  /// Of Σ Re(conj(dy)·y): of beta and gamma the part of samples [first, last); of x all, by these statistics as constants or not.
  [[nodiscard]] gradients backward(std::vector<wide_complex> const& x, std::vector<wide_complex> const& dy,
                                   std::vector<wide_complex> const& gamma, std::int64_t first, std::int64_t last,
                                   bool constant) const {
    gradients own{std::vector<wide_complex>(x.size()), std::vector<wide_complex>(mean.size()),
                  std::vector<wide_complex>(mean.size())};
    std::vector<wide_complex> sum(mean.size()); // of the gradients of (x − mean)·inv_std
    std::vector<long double> product(mean.size());
    auto const per_sample = static_cast<std::size_t>(channels * spatial);
    each([&](std::size_t c, std::size_t i, bool counted) {
      if (!counted && zeroes) return;
      auto const turned = std::conj(gamma[c]) * dy[i];
      sum[c] += turned;
      product[c] += (turned * std::conj(x[i] - mean[c])).real();
      auto const sample = static_cast<std::int64_t>(i / per_sample);
      if (sample < first || sample >= last) return;
      own.beta[c] += dy[i];
      own.gamma[c] += dy[i] * std::conj(x[i] - mean[c]) * inv_std[c];
    });
    auto const count = static_cast<long double>(n);
    each([&](std::size_t c, std::size_t i, bool counted) {
      wide_complex v = counted || !zeroes ? std::conj(gamma[c]) * dy[i] : wide_complex{};
      if (counted && !constant)
        v -= sum[c] / count + (x[i] - mean[c]) * (inv_std[c] * inv_std[c] * product[c] / (count - lost));
      own.dx[i] = inv_std[c] * v;
    });
    return own;
  }

private:
  /// f(channel, index, whether the position counts).
  template <class F>
  void each(F const& f) const {
    std::size_t i = 0;
    for (std::int64_t s = 0; s < samples; ++s)
      for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c)
        for (std::int64_t p = 0; p < spatial; ++p) f(c, i++, counts[static_cast<std::size_t>(s * spatial + p)] != 0);
  }
};

/// How complex numbers are spread over ranks and micro-batches, lie in memory, and are normalized.
struct complex_case {
  std::vector<std::vector<std::int64_t>> shares; // samples of each micro-batch of each rank
  std::int64_t channels, spatial;
  layout order;
  syncnorm::batch_norm_options norm{.eps = 1e-3, .momentum = 0.3};
  std::optional<syncnorm::masked_outputs> masked{};
  syncnorm::gamma_numbers gamma = syncnorm::gamma_numbers::real;

  /// What else there is to choose, of which each turn has something else.
  void take_turn(std::size_t turn) {
    norm.exchange = turn % 2 == 0 ? syncnorm::exchange_policy::gather : syncnorm::exchange_policy::reduce;
    if (turn % 3 == 1) masked = syncnorm::masked_outputs::normalized;
    if (turn % 3 == 2) masked = syncnorm::masked_outputs::zero;
    if (turn % 5 == 1) norm.normalize_by = syncnorm::batch_variance::unbiased;
    if (turn % 5 == 2) norm.variance = syncnorm::running_variance::biased;
    if (turn % 5 == 3) norm.variance = syncnorm::running_variance::standard_deviation;
    if (turn % 5 == 4) norm.momentum = std::nullopt;
    if (turn % 7 > 3) gamma = syncnorm::gamma_numbers::complex;
  }

  [[nodiscard]] std::string name() const {
    return std::to_string(shares.size()) + " ranks, C " + std::to_string(channels) + ", S " + std::to_string(spatial) +
           ", layout " + std::to_string(static_cast<int>(order)) + (masked ? ", masked" : "") +
           (gamma == syncnorm::gamma_numbers::complex ? ", complex gamma" : "");
  }
};

/// The operands of this rank, by micro-batches, of a whole batch.
template <class T>
struct complex_operands {
  using number = std::complex<T>;

  std::vector<std::unique_ptr<owned_tensor<number>>> owned;
  std::vector<syncnorm::tensor_view<number>> x, dy, y, dx;
  std::vector<syncnorm::tensor_view<number const>> read_x, read_dy;
  std::vector<std::vector<std::uint8_t>> counts;
  std::vector<syncnorm::batch_norm_mask> masks;

  complex_operands(complex_case const& of, std::size_t rank, std::int64_t first, std::vector<wide_complex> const& of_x,
                   std::vector<wide_complex> const& of_dy, std::vector<std::uint8_t> const& of_counts) {
    auto const make = [&](std::int64_t n) {
      owned.push_back(std::make_unique<owned_tensor<number>>(of.order, n, of.channels, of.spatial));
      return owned.back()->view;
    };
    for (auto const n : of.shares[rank]) {
      for (auto* const views : {&x, &dy, &y, &dx}) views->push_back(make(n));
      auto const begin = of_counts.begin() + first * of.spatial;
      counts.emplace_back(begin, begin + n * of.spatial);
      for (std::int64_t s = 0; s < n; ++s)
        for (std::int64_t c = 0; c < of.channels; ++c)
          for (std::int64_t p = 0; p < of.spatial; ++p) {
            auto const i = static_cast<std::size_t>(((first + s) * of.channels + c) * of.spatial + p);
            x.back()(s, c, p) = number{of_x[i]};
            dy.back()(s, c, p) = number{of_dy[i]};
          }
      first += n;
    }
    read_x.assign(x.begin(), x.end());
    read_dy.assign(dy.begin(), dy.end());
    for (std::size_t k = 0; of.masked && k < x.size(); ++k)
      masks.push_back({syncnorm::mask_of(counts[k].data(), x[k].samples, of.spatial), *of.masked});
  }
};

/// Two steps of the layer of `make()` and one in evaluation, each with its backward pass, against the oracle; returns what is wrong.
template <class T, syncnorm::communicator C, class Make>
std::vector<std::string> run_complex_case(complex_case const& of, C const& comm, Make const& make) {
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  std::int64_t samples = 0, first = 0, last = 0;
  for (std::size_t r = 0; r < of.shares.size(); ++r) {
    if (r == rank) first = samples;
    for (auto const n : of.shares[r]) samples += n;
    if (r == rank) last = samples;
  }
  auto const size = static_cast<std::size_t>(samples * of.channels * of.spatial);
  auto const value = [](std::uint64_t stream, std::size_t i, double middle, double skew) {
    return wide_complex{std::complex<T>{static_cast<T>(middle + noise(stream, i)),
                                        static_cast<T>(skew * noise(stream + 1, i) - middle)}};
  };
  std::vector<wide_complex> x(size), dy(size), beta(static_cast<std::size_t>(of.channels));
  std::vector<wide_complex> gamma(beta.size());
  bool const complex_gamma = of.gamma == syncnorm::gamma_numbers::complex;
  for (std::size_t i = 0; i < size; ++i) x[i] = value(1, i, 0.5, 2), dy[i] = value(3, i, 0, 1);
  for (std::size_t c = 0; c < beta.size(); ++c)
    beta[c] = value(5, c, 0.25, 1),
    gamma[c] = {static_cast<T>(1.25 + noise(7, c)), complex_gamma ? static_cast<T>(2 * noise(9, c)) : T{0}};
  std::vector<std::uint8_t> counts(static_cast<std::size_t>(samples * of.spatial), 1);
  for (std::size_t i = 0; of.masked && i < counts.size(); ++i) counts[i] = noise(8, i) < 0.3 ? 1 : 0;
  if (of.masked) counts.front() = counts.back() = 1;

  complex_oracle oracle{samples,
                        of.channels,
                        of.spatial,
                        counts,
                        of.masked == syncnorm::masked_outputs::zero,
                        of.norm.eps,
                        of.norm.normalize_by == syncnorm::batch_variance::unbiased ? 1.0L : 0.0L};
  oracle.learn(x);
  complex_operands<T> own{of, rank, first, x, dy, counts};
  auto layer = make();
  for (std::size_t c = 0; c < beta.size(); ++c) {
    layer.gamma()[c] = static_cast<T>(gamma[c].real()), layer.beta()[c] = std::complex<T>{beta[c]};
    if (complex_gamma) layer.gamma_imag()[c] = static_cast<T>(gamma[c].imag());
  }

  std::vector<std::string> failures;
  auto const expect = [&](bool holds, std::string const& what) {
    if (!holds) failures.push_back(of.name() + ", rank " + std::to_string(rank) + ": " + what);
  };
  auto const expect_close = [&](comparison const& c, std::string const& what) {
    expect(c.within(tolerance<T>), what + " off by " + c.text());
  };
  auto const add = [](comparison& to, std::complex<T> got, wide_complex expected) {
    to.add(static_cast<double>(got.real()), expected.real());
    to.add(static_cast<double>(got.imag()), expected.imag());
  };
  auto const expect_tensors = [&](auto const& views, std::vector<wide_complex> const& expected, char const* what) {
    long double scale = 0; // over all ranks
    for (auto const& each : expected) scale = std::max({scale, std::abs(each.real()), std::abs(each.imag())});
    comparison all{scale};
    auto sample = first;
    for (auto const& view : views)
      for (std::int64_t s = 0; s < view.samples; ++s, ++sample)
        for (std::int64_t c = 0; c < of.channels; ++c)
          for (std::int64_t p = 0; p < of.spatial; ++p)
            add(all, view(s, c, p), expected[static_cast<std::size_t>((sample * of.channels + c) * of.spatial + p)]);
    expect_close(all, what);
  };
  auto const check_gradients = [&](bool constant, std::string const& how) {
    auto const expected = oracle.backward(x, dy, gamma, first, last, constant);
    expect_tensors(own.dx, expected.dx, ("dx" + how).c_str());
    comparison of_gamma{1}, of_beta{1};
    for (std::size_t c = 0; c < beta.size(); ++c) {
      of_gamma.add(static_cast<double>(layer.gamma_grad()[c]), expected.gamma[c].real());
      if (complex_gamma) of_gamma.add(static_cast<double>(layer.gamma_imag_grad()[c]), expected.gamma[c].imag());
      add(of_beta, layer.beta_grad()[c], expected.beta[c]);
    }
    expect_close(of_gamma, "the gradient of gamma" + how);
    expect_close(of_beta, "the gradient of beta" + how);
  };

  std::vector<wide_complex> running_mean(beta.size());
  std::vector<long double> running_var(beta.size(), 1);
  auto const count = static_cast<long double>(oracle.n);
  for (int step = 0; step < 2; ++step) {
    layer.zero_grad();
    layer.forward(own.read_x, own.y, own.masks);
    layer.backward(own.read_x, own.read_dy, own.dx, own.masks);
    auto const weight = static_cast<long double>(of.norm.momentum.value_or(1.0 / (step + 1)));
    for (std::size_t c = 0; c < beta.size(); ++c) {
      long double var = oracle.var[c];
      if (of.norm.variance == syncnorm::running_variance::unbiased) var *= count / (count - 1);
      if (of.norm.variance == syncnorm::running_variance::standard_deviation) var = 1 / oracle.inv_std[c];
      running_mean[c] = (1 - weight) * running_mean[c] + weight * oracle.mean[c];
      running_var[c] = (1 - weight) * running_var[c] + weight * var;
    }
  }
  expect_tensors(own.y, oracle.forward(x, gamma, beta), "y");
  check_gradients(false, "");
  comparison of_mean{1}, of_inv_std{1}, of_running_mean{1}, of_running_var{1};
  for (std::size_t c = 0; c < beta.size(); ++c) {
    of_mean.add(layer.saved().mean[2 * c], oracle.mean[c].real());
    of_mean.add(layer.saved().mean[2 * c + 1], oracle.mean[c].imag());
    for (std::size_t part = 0; part < 2; ++part) of_inv_std.add(layer.saved().inv_std[2 * c + part], oracle.inv_std[c]);
    add(of_running_mean, layer.running_mean()[c], running_mean[c]);
    of_running_var.add(static_cast<double>(layer.running_var()[c]), running_var[c]);
  }
  expect_close(of_mean, "mean");
  expect_close(of_inv_std, "inv_std");
  expect_close(of_running_mean, "running_mean");
  expect_close(of_running_var, "running_var");
  expect(layer.saved().count == oracle.n, "a wrong count");
  expect(layer.num_batches_tracked() == 2, "a wrong num_batches_tracked");

  std::vector<std::byte> bits;
  auto const append = [&](auto const& values) {
    auto const bytes = std::as_bytes(std::span{values});
    bits.insert(bits.end(), bytes.begin(), bytes.end());
  };
  append(layer.saved().mean), append(layer.saved().inv_std);
  append(layer.running_mean()), append(layer.running_var());
  std::vector<std::byte> all(bits.size() * of.shares.size());
  syncnorm::allgather(comm, bits, std::span{all});
  for (std::size_t r = 0; r < of.shares.size(); ++r)
    expect(std::memcmp(all.data() + r * bits.size(), bits.data(), bits.size()) == 0,
           "other bits of the statistics than rank " + std::to_string(r));

  // Evaluation, by statistics that have been checked.
  bool const deviations = of.norm.variance == syncnorm::running_variance::standard_deviation;
  for (std::size_t c = 0; c < beta.size(); ++c) {
    auto const var = static_cast<long double>(layer.running_var()[c]);
    oracle.mean[c] = wide_complex{layer.running_mean()[c]};
    oracle.inv_std[c] = deviations ? 1 / var : 1 / std::sqrt(var + oracle.eps);
  }
  layer.eval();
  layer.zero_grad();
  layer.forward(own.read_x, own.y, own.masks);
  layer.backward(own.read_x, own.read_dy, own.dx, own.masks);
  expect_tensors(own.y, oracle.forward(x, gamma, beta), "y in evaluation");
  check_gradients(true, " in evaluation");
  return failures;
}

} // namespace test
