#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid.hpp>
#include <ops/grid_case.hpp>
#include <support/oracle.hpp>

namespace test {

/// Samples of each micro-batch of each rank.
using micro_batch_share = std::vector<std::vector<std::int64_t>>;

/// Even and uneven micro-batches, empty ones, ranks with another number of them, and ranks with none.
inline std::vector<micro_batch_share> const micro_batch_shares{
    {{4, 4}, {4, 4}}, {{1, 5, 2}, {3}, {0, 2}}, {{0, 0}, {2, 1, 1, 3}}, {{}, {2, 3}, {}}, {{1, 0, 1}, {}, {0}, {6}}};

/// Two steps of a layer over micro-batches, against the oracle on all of them concatenated; returns what is wrong.
template <class T, syncnorm::communicator C>
std::vector<std::string> check_micro_batches(C const& comm, micro_batch_share const& shares, layout order,
                                             std::int64_t channels,
                                             syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic,
                                             std::int64_t positions = 5) {
  std::int64_t const spatial = order == layout::nc ? 1 : positions;
  double const eps = 1e-3, momentum = 0.3;
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  auto const total = [](auto const& of) { return std::accumulate(of.begin(), of.end(), std::int64_t{0}); };
  std::int64_t samples = 0, first = 0;
  for (std::size_t r = 0; r < shares.size(); ++r) {
    if (r == rank) first = samples;
    samples += total(shares[r]);
  }
  auto const fill = [&](std::uint64_t stream, std::int64_t size, double mean) {
    std::vector<T> values(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(mean + noise(stream, i));
    return values;
  };
  auto const x = fill(1, samples * channels * spatial, 0.5), dy = fill(2, samples * channels * spatial, 0);
  auto const gamma = fill(3, channels, 2), beta = fill(4, channels, 0);
  bool const unbiased = channels % 2 == 1;
  batch_norm_oracle const oracle{x, samples, channels, spatial, eps, unbiased};
  auto const y = oracle.forward(x, gamma, beta);
  auto const gradients = oracle.backward(x, dy, gamma);
  auto const own_last = first + total(shares[rank]);
  auto const parameters = oracle.parameter_gradients(x, dy, first, own_last);

  std::vector<std::unique_ptr<owned_tensor<T>>> owned;
  std::vector<syncnorm::tensor_view<T const>> xs, dys;
  std::vector<syncnorm::tensor_view<T>> ys, dxs;
  auto const at = [&](std::int64_t n, std::int64_t c, std::int64_t s) {
    return static_cast<std::size_t>((n * channels + c) * spatial + s);
  };
  auto const each = [&](auto const& f) { // f(k, view indices, index into the whole batch)
    auto sample = first;
    for (std::size_t k = 0; k < shares[rank].size(); ++k)
      for (std::int64_t n = 0; n < shares[rank][k]; ++n, ++sample)
        for (std::int64_t c = 0; c < channels; ++c)
          for (std::int64_t s = 0; s < spatial; ++s) f(k, n, c, s, at(sample, c, s));
  };
  auto const make = [&](std::int64_t n) {
    owned.push_back(std::make_unique<owned_tensor<T>>(order, n, channels, spatial));
    return owned.back()->view;
  };
  std::vector<syncnorm::tensor_view<T>> x_views, dy_views;
  for (auto const n : shares[rank]) {
    x_views.push_back(make(n)), dy_views.push_back(make(n));
    ys.push_back(make(n)), dxs.push_back(make(n));
  }
  each([&](auto k, auto n, auto c, auto s, auto i) {
    x_views[k](n, c, s) = x[i];
    dy_views[k](n, c, s) = dy[i];
  });
  xs.assign(x_views.begin(), x_views.end());
  dys.assign(dy_views.begin(), dy_views.end());

  syncnorm::batch_norm_options norm{.eps = eps, .momentum = momentum, .exchange = policy};
  if (unbiased) norm.normalize_by = syncnorm::batch_variance::unbiased;
  syncnorm::batch_norm<T, C> layer{comm, channels, {.norm = norm}};
  std::ranges::copy(gamma, layer.gamma().begin());
  std::ranges::copy(beta, layer.beta().begin());
  for (int step = 0; step < 2; ++step) {
    layer.zero_grad();
    layer.forward(xs, ys);
    layer.backward(xs, dys, dxs);
  }

  std::vector<std::string> failures;
  auto const expect = [&](comparison const& c, char const* what) {
    if (!c.within(tolerance<T>))
      failures.push_back(std::string{what} + " off by " + c.text() + " on rank " + std::to_string(rank) + ", C " +
                         std::to_string(channels));
  };
  auto const scale = [](auto const& values) {
    long double most = 0;
    for (auto const value : values) most = std::max(most, std::abs(static_cast<long double>(value)));
    return most;
  };
  comparison of_y{scale(y)}, of_dx{scale(gradients.dx)};
  each([&](auto k, auto n, auto c, auto s, auto i) {
    of_y.add(static_cast<double>(ys[k](n, c, s)), y[i]);
    of_dx.add(static_cast<double>(dxs[k](n, c, s)), gradients.dx[i]);
  });
  expect(of_y, "y");
  expect(of_dx, "dx");
  comparison of_gamma{1}, of_beta{1}, of_mean{1}, of_var{1};
  auto const count = static_cast<long double>(samples * spatial);
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    of_gamma.add(static_cast<double>(layer.gamma_grad()[c]), parameters.gamma[c]);
    of_beta.add(static_cast<double>(layer.beta_grad()[c]), parameters.beta[c]);
    auto const kept = [&](long double from, long double value) {
      for (int step = 0; step < 2; ++step) from = (1 - momentum) * from + momentum * value;
      return from;
    };
    of_mean.add(static_cast<double>(layer.running_mean()[c]), kept(0, oracle.mean[c]));
    of_var.add(static_cast<double>(layer.running_var()[c]), kept(1, oracle.var[c] * count / (count - 1)));
  }
  expect(of_gamma, "the gradient of gamma");
  expect(of_beta, "the gradient of beta");
  expect(of_mean, "running_mean");
  expect(of_var, "running_var");
  if (layer.num_batches_tracked() != 2) failures.emplace_back("a wrong num_batches_tracked");
  if (layer.saved().count != samples * spatial) failures.emplace_back("a wrong count");
  return failures;
}

} // namespace test
