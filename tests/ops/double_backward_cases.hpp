#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid_case.hpp>
#include <support/epilogue_oracle.hpp>

namespace test {

/// A loss of the results of backward passes, over the whole batch, by the oracle in long double:
///
///     L = Σ u·dx + Σ v·dresidual + Σ over ranks of a_r·(the gradient of gamma on rank r) + b_r·(that of beta)
struct second_order_case {
  std::vector<std::int64_t> shares; // samples of each rank
  std::int64_t channels = 2, spatial = 3;
  double eps = 0.1, slope = 1;
  bool has_gamma = true, has_u = true, has_ab = true, has_residual = false, zeroes = false;
  std::int64_t batches = 1;                                     // of each rank
  std::vector<unsigned char> mask{};                            // `[N, S]`; empty: none
  std::vector<double> x, dy, u, v, residual, gamma, beta, a, b; // `[N, C, S]`, `[C]`, and `[P, C]`

  explicit second_order_case(std::vector<std::int64_t> const& samples_of_ranks) : shares{samples_of_ranks} {
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
  [[nodiscard]] bool has_epilogue() const { return slope != 1 || has_residual || !mask.empty(); }

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
                         eps};
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

/// The double backward pass of this rank against differences of the oracle's loss; returns what is wrong.
template <syncnorm::communicator C>
std::vector<std::string> check_double_backward(C const& comm, second_order_case problem,
                                               syncnorm::exchange_policy policy, layout order = layout::nchw) {
  using syncnorm::tensor_view;
  std::vector<std::string> failures;
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  auto const samples = problem.shares[rank], first = problem.first_of(rank), channels = problem.channels;
  auto const make = [&] { return owned_tensor<double>{order, samples, channels, problem.spatial}; };
  auto x = make(), dy = make(), u = make(), v = make(), residual = make(), dx = make(), to_dy = make(), to_x = make();
  auto const each = [&](auto const& f) {
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t s = 0; s < problem.spatial; ++s)
          f(n, c, s, static_cast<std::size_t>(((first + n) * channels + c) * problem.spatial + s));
  };
  each([&](auto n, auto c, auto s, auto i) {
    x.view(n, c, s) = problem.x[i], dy.view(n, c, s) = problem.dy[i], u.view(n, c, s) = problem.u[i];
    v.view(n, c, s) = problem.v[i], residual.view(n, c, s) = problem.residual[i];
  });
  syncnorm::batch_norm_epilogue<double> epilogue{.activation = {problem.slope}};
  if (problem.has_residual) epilogue.residual = residual.view;
  if (!problem.mask.empty())
    epilogue.mask = syncnorm::mask_of(problem.mask.data() + first * problem.spatial, samples, problem.spatial);
  if (problem.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;

  syncnorm::batch_norm<double, C> layer{
      comm, channels, {.norm = {.eps = problem.eps, .exchange = policy}, .affine = problem.has_gamma}};
  if (problem.has_gamma) {
    std::ranges::copy(problem.gamma, layer.gamma().begin());
    std::ranges::copy(problem.beta, layer.beta().begin());
  }
  auto const offset = rank * static_cast<std::size_t>(channels), length = static_cast<std::size_t>(channels);
  std::span<double const> a, b;
  if (problem.has_ab)
    a = std::span{problem.a}.subspan(offset, length), b = std::span{problem.b}.subspan(offset, length);
  if (problem.batches == 1) {
    layer.forward(x.view, dx.view, epilogue);
    layer.backward(x.view, dy.view, dx.view, epilogue, {});
    layer.zero_grad();
    syncnorm::batch_norm_second_order<double, double> second{.gamma_gradient = a, .beta_gradient = b};
    if (problem.has_u) second.dx = u.view;
    if (problem.has_residual) second.dresidual = v.view;
    // Twice, as gradients add up.
    for (int step = 0; step < 2; ++step)
      layer.double_backward(second, x.view, dy.view, to_dy.view, to_x.view, {}, epilogue);
  } else {
    auto const cut = [&](auto const& view) {
      std::vector<std::remove_cvref_t<decltype(view)>> parts;
      for (std::int64_t k = 0; k < problem.batches; ++k) {
        auto const begin = k * samples / problem.batches, end = (k + 1) * samples / problem.batches;
        parts.push_back(view.sample_range(begin, end - begin));
      }
      return parts;
    };
    auto const read = [&](tensor_view<double const> const& of) { return cut(of); };
    auto const xs = read(x.view), dys = read(dy.view), us = read(u.view), vs = read(v.view),
               residuals = read(residual.view);
    auto const dxs = cut(dx.view), to_dys = cut(to_dy.view), to_xs = cut(to_x.view);
    std::vector<syncnorm::batch_norm_epilogue<double>> epilogues;
    std::int64_t begin = 0;
    for (std::size_t k = 0; k < xs.size(); ++k) {
      auto& part = epilogues.emplace_back(epilogue);
      if (problem.has_residual) part.residual = residuals[k];
      if (epilogue.mask)
        part.mask = syncnorm::mask_of(epilogue.mask.data + begin * problem.spatial, xs[k].samples, problem.spatial);
      begin += xs[k].samples;
    }
    layer.forward(xs, dxs, epilogues);
    layer.backward(xs, dys, dxs, {}, epilogues);
    layer.zero_grad();
    syncnorm::batch_norm_second_order_batches<double, double> second{.gamma_gradient = a, .beta_gradient = b};
    if (problem.has_u) second.dx = us;
    if (problem.has_residual) second.dresidual = vs;
    for (int step = 0; step < 2; ++step) layer.double_backward(second, xs, dys, to_dys, to_xs, {}, epilogues);
  }

  auto const compare = [&](double got, double expected, char const* what) {
    if (!(std::abs(got - expected) <= 1e-9 * std::max(1.0, std::abs(expected))))
      failures.push_back(std::string{what} + ": " + std::to_string(got) + ", expected " + std::to_string(expected) +
                         ", rank " + std::to_string(rank));
  };
  each([&](auto n, auto c, auto s, auto i) {
    compare(to_dy.view(n, c, s), problem.slope_of(problem.dy[i]), "to dy");
    compare(to_x.view(n, c, s), problem.slope_of(problem.x[i]), "to x");
  });
  // Of what this rank computes, since each has a gamma of its own.
  for (std::size_t c = 0; c < layer.gamma_grad().size(); ++c)
    compare(layer.gamma_grad()[c], 2 * problem.slope_of(problem.gamma[c], static_cast<int>(rank)), "to gamma");
  return failures;
}

} // namespace test
