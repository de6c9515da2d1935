#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid_case.hpp>
#include <support/oracle.hpp>

namespace test {

/// A loss of the results of backward passes, over the whole batch, by the oracle in long double:
///
///     L = Σ u·dx + Σ over ranks of a_r·(the gradient of gamma on rank r) + b_r·(the gradient of beta on rank r)
struct second_order_case {
  std::vector<std::int64_t> shares; // samples of each rank
  std::int64_t channels = 2, spatial = 3;
  double eps = 0.1;
  bool has_gamma = true, has_u = true, has_ab = true;
  std::vector<double> x, dy, u, gamma, a, b; // `[N, C, S]`, `[C]`, and `[P, C]`

  explicit second_order_case(std::vector<std::int64_t> const& samples_of_ranks) : shares{samples_of_ranks} {
    auto const fill = [](std::uint64_t stream, std::int64_t size, double mean) {
      std::vector<double> values(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + noise(stream, i);
      return values;
    };
    auto const size = samples() * channels * spatial, ranks = std::ssize(shares);
    x = fill(1, size, 0.5), dy = fill(2, size, 0.25), u = fill(3, size, -0.25), gamma = fill(4, channels, 1.5);
    a = fill(5, ranks * channels, 0), b = fill(6, ranks * channels, 0);
  }

  [[nodiscard]] std::int64_t samples() const { return std::accumulate(shares.begin(), shares.end(), std::int64_t{0}); }
  [[nodiscard]] std::int64_t first_of(std::size_t rank) const {
    return std::accumulate(shares.begin(), shares.begin() + static_cast<std::ptrdiff_t>(rank), std::int64_t{0});
  }
  [[nodiscard]] std::vector<double> weights() const { return has_gamma ? gamma : std::vector<double>{}; }

  /// L where gamma has the value it has, of `rank` alone where that is given: the part of L that this rank computes.
  [[nodiscard]] long double loss(int rank = -1) const {
    batch_norm_oracle const oracle{x, samples(), channels, spatial, eps};
    auto const gradients = oracle.backward(x, dy, weights());
    long double sum = 0;
    auto const of_sample = static_cast<std::size_t>(channels * spatial);
    for (std::size_t r = 0; r < shares.size(); ++r) {
      if (rank >= 0 && static_cast<int>(r) != rank) continue;
      auto const first = first_of(r), last = first + shares[r];
      if (has_u)
        for (auto i = of_sample * static_cast<std::size_t>(first); i < of_sample * static_cast<std::size_t>(last); ++i)
          sum += static_cast<long double>(u[i]) * gradients.dx[i];
      if (!has_ab) continue;
      auto const parameters = oracle.parameter_gradients(x, dy, first, last);
      for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
        auto const i = r * static_cast<std::size_t>(channels) + c;
        sum += a[i] * parameters.gamma[c] + b[i] * parameters.beta[c];
      }
    }
    return sum;
  }

  /// ∂L/∂value, by central differences of order 4 in long double.
  [[nodiscard]] double slope(double& value, int rank = -1) const {
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

/// The double backward pass of this rank against differences of the oracle's loss; returns what is wrong.
template <syncnorm::communicator C>
std::vector<std::string> check_double_backward(C const& comm, second_order_case problem,
                                               syncnorm::exchange_policy policy, layout order = layout::nchw) {
  std::vector<std::string> failures;
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  auto const samples = problem.shares[rank], first = problem.first_of(rank), channels = problem.channels;
  owned_tensor<double> x{order, samples, channels, problem.spatial}, dy{order, samples, channels, problem.spatial};
  owned_tensor<double> u{order, samples, channels, problem.spatial}, dx{order, samples, channels, problem.spatial};
  owned_tensor<double> to_dy{order, samples, channels, problem.spatial},
      to_x{order, samples, channels, problem.spatial};
  auto const each = [&](auto const& f) {
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t s = 0; s < problem.spatial; ++s)
          f(n, c, s, static_cast<std::size_t>(((first + n) * channels + c) * problem.spatial + s));
  };
  each([&](auto n, auto c, auto s, auto i) {
    x.view(n, c, s) = problem.x[i], dy.view(n, c, s) = problem.dy[i], u.view(n, c, s) = problem.u[i];
  });

  syncnorm::batch_norm<double, C> layer{
      comm, channels, {.norm = {.eps = problem.eps, .exchange = policy}, .affine = problem.has_gamma}};
  std::ranges::copy(problem.weights(), layer.gamma().begin());
  layer.forward(x.view, dx.view);
  layer.backward(x.view, dy.view, dx.view);
  layer.zero_grad();
  syncnorm::batch_norm_second_order<double, double> second;
  if (problem.has_u) second.dx = u.view;
  auto const offset = rank * static_cast<std::size_t>(channels), length = static_cast<std::size_t>(channels);
  if (problem.has_ab) {
    second.gamma_gradient = std::span{problem.a}.subspan(offset, length);
    second.beta_gradient = std::span{problem.b}.subspan(offset, length);
  }
  for (int step = 0; step < 2; ++step) layer.double_backward(second, x.view, dy.view, to_dy.view, to_x.view);

  auto const compare = [&](double got, double expected, char const* what) {
    if (!(std::abs(got - expected) <= 1e-9 * std::max(1.0, std::abs(expected))))
      failures.push_back(std::string{what} + ": " + std::to_string(got) + ", expected " + std::to_string(expected) +
                         ", rank " + std::to_string(rank));
  };
  each([&](auto n, auto c, auto s, auto i) {
    compare(to_dy.view(n, c, s), problem.slope(problem.dy[i]), "to dy");
    compare(to_x.view(n, c, s), problem.slope(problem.x[i]), "to x");
  });
  // Twice, as gradients add up; of what this rank computes, since each has a gamma of its own.
  for (std::size_t c = 0; c < layer.gamma_grad().size(); ++c)
    compare(layer.gamma_grad()[c], 2 * problem.slope(problem.gamma[c], static_cast<int>(rank)), "to gamma");
  return failures;
}

} // namespace test
