#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid_case.hpp>
#include <support/second_order_case.hpp>

namespace test {

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

  syncnorm::batch_norm_options norm{.eps = problem.eps, .exchange = policy};
  if (problem.unbiased) norm.normalize_by = syncnorm::batch_variance::unbiased;
  syncnorm::batch_norm<double, C> layer{comm, channels, {.norm = norm, .affine = problem.has_gamma}};
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
      layer.double_backward(second, x.view, dy.view, to_dy.view, to_x.view, epilogue);
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
    layer.backward(xs, dys, dxs, epilogues);
    layer.zero_grad();
    syncnorm::batch_norm_second_order_batches<double, double> second{.gamma_gradient = a, .beta_gradient = b};
    if (problem.has_u) second.dx = us;
    if (problem.has_residual) second.dresidual = vs;
    for (int step = 0; step < 2; ++step) layer.double_backward(second, xs, dys, to_dys, to_xs, epilogues);
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
