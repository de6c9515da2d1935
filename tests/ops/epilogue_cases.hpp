#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid.hpp>
#include <support/epilogue_oracle.hpp>

namespace test {

/// What a case asks of an epilogue besides a residual of its own.
struct epilogue_choice {
  double slope = 1;
  bool residual = false;
  enum counted { all, padded, scattered, on_odd_ranks, none } mask = all;
  bool zeroes = false, unbiased = false, exponential = false;

  [[nodiscard]] syncnorm::activation activation() const { return {slope, exponential}; }
  [[nodiscard]] std::string name() const {
    return (exponential ? "ELU " : "slope ") + std::to_string(slope) + (residual ? ", residual" : "") + ", mask " +
           std::to_string(mask) + (zeroes ? ", zeroes" : "");
  }
};

inline constexpr std::array epilogue_choices{
    epilogue_choice{0, false},
    epilogue_choice{0.25, true},
    epilogue_choice{-0.5, true, epilogue_choice::padded, true, true},
    epilogue_choice{1, false, epilogue_choice::padded, false},
    epilogue_choice{1, false, epilogue_choice::scattered, true},
    epilogue_choice{0, true, epilogue_choice::scattered, false, true},
    epilogue_choice{1, true, epilogue_choice::on_odd_ranks, false},
    epilogue_choice{0, false, epilogue_choice::on_odd_ranks, true},
    epilogue_choice{0, true, epilogue_choice::none, false},
    epilogue_choice{1, false, epilogue_choice::padded, true, false, true},
    epilogue_choice{0.75, true, epilogue_choice::all, false, true, true},
};

/// A case over the whole batch and what the oracle says of it.
template <class T>
struct epilogue_case {
  static constexpr double eps = 1e-3;

  grid_case cell;
  epilogue_choice choice;
  std::vector<T> x, dy, residual;
  std::vector<double> gamma, beta;
  std::vector<std::uint8_t> mask;
  epilogue_oracle oracle;

  epilogue_case(grid_case const& g, epilogue_choice const& chosen) : cell{g}, choice{chosen} {
    auto const size = static_cast<std::size_t>(g.samples() * g.channels * g.spatial);
    for (std::size_t i = 0; i < size; ++i) {
      x.push_back(syncnorm::from_double<T>(noise(1, i) + 0.3));
      dy.push_back(syncnorm::from_double<T>(noise(2, i)));
      if (chosen.residual) residual.push_back(syncnorm::from_double<T>(noise(3, i)));
    }
    for (std::size_t c = 0; c < static_cast<std::size_t>(g.channels); ++c) {
      gamma.push_back(static_cast<double>(static_cast<float>(noise(4, c) + 1.25)));
      beta.push_back(static_cast<double>(static_cast<float>(noise(5, c))));
    }
    for (int rank = 0; rank < g.ranks; ++rank)
      for (std::int64_t i = 0; chosen.mask != epilogue_choice::all && i < g.samples_of(rank) * g.spatial; ++i) {
        bool const scattered = noise(6, static_cast<std::uint64_t>(i)) < 0.25;
        bool const counts = chosen.mask == epilogue_choice::padded      ? i % g.spatial <= g.spatial * 2 / 3
                            : chosen.mask == epilogue_choice::scattered ? scattered
                            : chosen.mask == epilogue_choice::none      ? false
                                                                        : rank % 2 == 1 || g.ranks == 1;
        mask.push_back(counts ? 1 : 0);
      }
    oracle = {g.samples(), g.channels,    g.spatial,    wide(x), wide(gamma),     wide(beta),        wide(residual),
              mask,        chosen.zeroes, chosen.slope, eps,     chosen.unbiased, chosen.exponential};
    oracle.forward();
    oracle.for_each_near_kink(1e-5L, [&](std::size_t i) { dy[i] = syncnorm::from_double<T>(0); });
  }

  [[nodiscard]] syncnorm::batch_norm_options norm() const {
    syncnorm::batch_norm_options of{.eps = eps, .momentum = 0.5};
    if (choice.unbiased) of.normalize_by = syncnorm::batch_variance::unbiased;
    return of;
  }

  template <class Value>
  static std::vector<long double> wide(std::vector<Value> const& values) {
    std::vector<long double> all;
    for (auto const& value : values) all.push_back(static_cast<long double>(syncnorm::as_double(value)));
    return all;
  }
};

/// Runs one case on this rank of `comm`, training, backward, evaluation and its backward; returns what is wrong. `in_parts`: after a step
/// by which the ranks agree how to cut the next.
template <class T, syncnorm::communicator C>
std::vector<std::string> run_epilogue_case(epilogue_case<T> const& data, C const& comm, bool in_parts = false) {
  auto const& g = data.cell;
  int const rank = syncnorm::rank(comm);
  auto const samples = g.samples_of(rank), first = g.first_sample_of(rank);
  std::vector<std::string> failures;
  auto const expect = [&](bool holds, std::string const& what) {
    if (!holds)
      failures.push_back(g.name() + ", " + data.choice.name() + ", " + std::string{syncnorm::element_traits<T>::name} +
                         ", rank " + std::to_string(rank) + ": " + what);
  };
  auto const each = [&](auto const& f) {
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < g.channels; ++c)
        for (std::int64_t s = 0; s < g.spatial; ++s)
          f(n, c, s, static_cast<std::size_t>(((first + n) * g.channels + c) * g.spatial + s));
  };
  auto const expect_tensor = [&](owned_tensor<T> const& got, std::vector<long double> const& expected,
                                 char const* what) {
    comparison all{1};
    for (auto const value : expected) all.add(static_cast<double>(value), value);
    each([&](auto n, auto c, auto s, std::size_t i) { all.add(syncnorm::as_double(got.view(n, c, s)), expected[i]); });
    expect(all.within(tolerance<T>), std::string{what} + " off by " + all.text());
  };
  auto const expect_channels = [&](auto const& got, std::vector<long double> const& expected, char const* what) {
    comparison all{1};
    expect(got.size() == expected.size(), std::string{what} + " has a wrong size");
    for (std::size_t c = 0; c < got.size(); ++c) all.add(static_cast<double>(got[c]), expected[c]);
    expect(all.within(tolerance<T, double>), std::string{what} + " off by " + all.text());
  };

  auto const make = [&] { return owned_tensor<T>{g.order, samples, g.channels, g.spatial}; };
  auto x = make(), dy = make(), y = make(), dx = make(), residual = make(), dresidual = make();
  each([&](auto n, auto c, auto s, std::size_t i) {
    x.view(n, c, s) = data.x[i];
    dy.view(n, c, s) = data.dy[i];
    if (data.choice.residual) residual.view(n, c, s) = data.residual[i];
  });
  syncnorm::batch_norm_epilogue<T> epilogue{.activation = data.choice.activation()};
  if (data.choice.residual) epilogue.residual = residual.view;
  // A rank on which all positions count needs no mask.
  if (!data.mask.empty() && !(data.choice.mask == epilogue_choice::on_odd_ranks && rank % 2 == 1))
    epilogue.mask = syncnorm::mask_of(data.mask.data() + first * g.spatial, samples, g.spatial);
  if (data.choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;

  using P = syncnorm::accumulate_t<T>;
  syncnorm::batch_norm<T, C> layer{comm, g.channels, {.norm = data.norm()}};
  for (std::size_t c = 0; c < data.gamma.size(); ++c) {
    layer.gamma()[c] = static_cast<P>(data.gamma[c]);
    layer.beta()[c] = static_cast<P>(data.beta[c]);
  }
  auto const step = [&](syncnorm::tensor_view<T> const& to) {
    layer.forward(x.view, y.view, epilogue);
    layer.backward(x.view, dy.view, to, epilogue, data.choice.residual ? dresidual.view : syncnorm::tensor_view<T>{});
  };
  if (in_parts) {
    step(dx.view);
    step({});
    layer.zero_grad(), layer.reset_running_stats();
  }
  step(dx.view);

  auto const& oracle = data.oracle;
  auto const gradients = oracle.backward(data.wide(data.dy), first, first + samples);
  expect(layer.saved().count == oracle.count, "a wrong count");
  expect_channels(layer.saved().mean, oracle.mean, "mean");
  expect_channels(layer.saved().inv_std, oracle.inv_std, "inv_std");
  expect_tensor(y, oracle.y, "y");
  expect_tensor(dx, gradients.dx, "dx");
  if (data.choice.residual) expect_tensor(dresidual, gradients.dresidual, "the gradient of the residual");
  // Their scale is what they are summed of, here at most about 2 for each element.
  auto const magnitude = static_cast<long double>(std::max<std::int64_t>(1, g.samples() * g.spatial));
  auto const expect_sums = [&](std::span<P> got, std::vector<long double> const& expected, char const* what) {
    comparison all{magnitude};
    for (std::size_t c = 0; c < got.size(); ++c) all.add(static_cast<double>(got[c]), expected[c]);
    expect(all.within(tolerance<T, double>), std::string{what} + " off by " + all.text());
  };
  expect_sums(layer.gamma_grad(), gradients.gamma, "the gradient of gamma");
  expect_sums(layer.beta_grad(), gradients.beta, "the gradient of beta");
  std::vector<long double> running_mean, running_var;
  for (std::size_t c = 0; c < oracle.mean.size(); ++c) {
    bool const any = oracle.count > 0;
    running_mean.push_back(any ? oracle.mean[c] / 2 : 0);
    running_var.push_back(any ? 0.5L + oracle.m2[c] / 2 / static_cast<long double>(oracle.count - 1) : 1);
  }
  expect_channels(layer.running_mean(), running_mean, "running_mean");
  expect_channels(layer.running_var(), running_var, "running_var");
  expect(layer.num_batches_tracked() == (oracle.count > 0 ? 1 : 0), "a wrong num_batches_tracked");

  // In evaluation, statistics are constants, and every rank is by itself.
  auto constant = oracle;
  for (std::size_t c = 0; c < oracle.mean.size(); ++c) {
    constant.mean[c] = static_cast<long double>(layer.running_mean()[c]);
    constant.inv_std[c] = 1 / std::sqrt(static_cast<long double>(layer.running_var()[c]) + data.eps);
  }
  constant.constant_statistics();
  auto still = make();
  each([&](auto n, auto c, auto s, std::size_t i) {
    // As in training, no gradient goes to what is near a kink.
    still.view(n, c, s) =
        std::abs(constant.before(static_cast<std::size_t>(c), i)) < 1e-5L ? syncnorm::from_double<T>(0) : data.dy[i];
  });
  auto dy_of_all = data.wide(data.dy);
  constant.for_each_near_kink(1e-5L, [&](std::size_t i) { dy_of_all[i] = 0; });
  layer.eval();
  layer.zero_grad();
  layer.forward(x.view, y.view, epilogue);
  layer.backward(x.view, still.view, dx.view, epilogue,
                 data.choice.residual ? dresidual.view : syncnorm::tensor_view<T>{});
  auto const of_constant = constant.backward(dy_of_all, first, first + samples);
  expect_tensor(y, constant.y, "y in evaluation");
  expect_tensor(dx, of_constant.dx, "dx in evaluation");
  if (data.choice.residual)
    expect_tensor(dresidual, of_constant.dresidual, "the gradient of the residual in evaluation");
  expect_sums(layer.gamma_grad(), of_constant.gamma, "the gradient of gamma in evaluation");
  expect_sums(layer.beta_grad(), of_constant.beta, "the gradient of beta in evaluation");
  return failures;
}

} // namespace test
