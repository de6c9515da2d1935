#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid_case.hpp>
#include <support/oracle.hpp>

// Which statistics a layer normalizes by and keeps, and which affine parameters it has.
namespace {

using syncnorm::running_variance;
using syncnorm::thread_communicator;
using layer_of_doubles = syncnorm::batch_norm<double, thread_communicator>;

constexpr std::int64_t layer_channels = 3, layer_spatial = 4, per_rank = 5;
constexpr std::size_t rank_size = per_rank * layer_channels * layer_spatial;

auto view(auto& values) { return syncnorm::nchw(values.data(), per_rank, layer_channels, layer_spatial); }

/// The samples of rank `rank`, of a batch over two ranks.
auto share(auto& values, int rank) {
  return syncnorm::nchw(values.data(), 2 * per_rank, layer_channels, layer_spatial)
      .sample_range(rank * per_rank, per_rank);
}

} // namespace

TEST_CASE("frozen statistics: training by constants, local, and differentiable") {
  auto x = test::noise_vector(1, rank_size);
  auto const dy = test::noise_vector(2, rank_size);
  for (auto const kind : {running_variance::unbiased, running_variance::standard_deviation}) {
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      layer_of_doubles layer{comm, layer_channels, {.norm = {.eps = 0.25, .variance = kind}}};
      for (std::size_t c = 0; c < layer_channels; ++c) {
        auto const value = static_cast<double>(c);
        layer.gamma()[c] = 1.5 + value, layer.beta()[c] = 0.2 * value;
        layer.running_mean()[c] = 0.3 * value, layer.running_var()[c] = 0.7 + value;
      }
      layer.freeze_statistics();
      CHECK(layer.has_frozen_statistics());
      CHECK(layer.is_training());
      std::vector<double> const mean(layer.running_mean().begin(), layer.running_mean().end());
      std::vector<double> const var(layer.running_var().begin(), layer.running_var().end());
      if (comm.rank() == 0) { // not collective: rank 1 does not come
        std::vector<double> y(rank_size), dx(rank_size);
        auto const loss = [&] {
          layer.forward(view(x), view(y));
          double sum = 0;
          for (std::size_t i = 0; i < rank_size; ++i) sum += dy[i] * y[i];
          return sum;
        };
        loss();
        bool const is_deviation = kind == running_variance::standard_deviation;
        for (std::size_t i = 0; i < rank_size; ++i) {
          auto const c = i / layer_spatial % layer_channels;
          auto const deviation = is_deviation ? var[c] : std::sqrt(var[c] + 0.25);
          CHECK(y[i] ==
                doctest::Approx((x[i] - mean[c]) / deviation * layer.gamma()[c] + layer.beta()[c]).epsilon(1e-13));
        }
        layer.backward(view(x), view(dy), view(dx));
        double const h = 1e-5;
        auto const slope = [&](double& value) {
          double const before = value;
          value = before + h;
          double const up = loss();
          value = before - h;
          double const down = loss();
          value = before;
          return (up - down) / (2 * h);
        };
        for (std::size_t i = 0; i < rank_size; ++i) CHECK(std::abs(dx[i] - slope(x[i])) < 1e-8);
        for (std::size_t c = 0; c < layer_channels; ++c) {
          CHECK(std::abs(layer.gamma_grad()[c] - slope(layer.gamma()[c])) < 1e-8);
          CHECK(std::abs(layer.beta_grad()[c] - slope(layer.beta()[c])) < 1e-8);
        }
        CHECK(std::equal(mean.begin(), mean.end(), layer.running_mean().begin()));
        CHECK(std::equal(var.begin(), var.end(), layer.running_var().begin()));
        CHECK(layer.num_batches_tracked() == 0);
      }
      // Thawed, it is collective again and tracks.
      layer.freeze_statistics(false);
      std::vector<double> y(rank_size);
      layer.forward(view(dy), view(y));
      CHECK(layer.num_batches_tracked() == 1);
    });
  }
}

TEST_CASE("the running standard deviation is kept in place of a variance on request") {
  auto const x = test::noise_vector(3, 2 * rank_size);
  test::batch_norm_oracle const oracle{x, 2 * per_rank, layer_channels, layer_spatial, 0.125};
  syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
    layer_of_doubles layer{comm,
                           layer_channels,
                           {.norm = {.eps = 0.125, .momentum = 0.1, .variance = running_variance::standard_deviation}}};
    std::vector<double> y(rank_size);
    for (int step = 0; step < 2; ++step) layer.forward(share(x, comm.rank()), view(y));
    for (std::size_t c = 0; c < layer_channels; ++c) {
      auto const deviation = static_cast<double>(std::sqrt(oracle.var[c] + 0.125L));
      double const kept = 0.9 * (0.9 + 0.1 * deviation) + 0.1 * deviation;
      CHECK(layer.running_var()[c] == doctest::Approx(kept).epsilon(1e-13));
    }
    layer.eval();
    layer.forward(share(x, comm.rank()), view(y));
    auto const own = share(x, comm.rank());
    for (std::int64_t n = 0; n < per_rank; ++n)
      for (std::int64_t c = 0; c < layer_channels; ++c) {
        auto const ch = static_cast<std::size_t>(c);
        double const expected = (own(n, c, 0) - layer.running_mean()[ch]) / layer.running_var()[ch];
        CHECK(view(y)(n, c, 0) == doctest::Approx(expected).epsilon(1e-12));
      }
  });
}

TEST_CASE("normalization by the unbiased variance, with its gradients, and a running deviation of the same variance") {
  auto const x = test::noise_vector(9, 2 * rank_size), dy = test::noise_vector(10, 2 * rank_size);
  test::batch_norm_oracle const oracle{x, 2 * per_rank, layer_channels, layer_spatial, 0.125, true};
  std::vector<double> const gamma{0.5, -2, 3}, beta{1, 2, -3};
  auto const y = oracle.forward(x, gamma, beta);
  auto const gradients = oracle.backward(x, dy, gamma);
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      layer_of_doubles layer{comm,
                             layer_channels,
                             {.norm = {.eps = 0.125,
                                       .momentum = 1.0,
                                       .variance = running_variance::standard_deviation,
                                       .exchange = policy,
                                       .normalize_by = syncnorm::batch_variance::unbiased}}};
      std::ranges::copy(gamma, layer.gamma().begin());
      std::ranges::copy(beta, layer.beta().begin());
      auto const own = share(x, comm.rank());
      std::vector<double> own_y(rank_size), dx(rank_size);
      layer.begin_forward(own, view(own_y)).finish();
      layer.begin_backward(own, share(dy, comm.rank()), view(dx)).finish();
      auto const first = rank_size * static_cast<std::size_t>(comm.rank());
      for (std::size_t i = 0; i < rank_size; ++i) {
        CHECK(std::abs(own_y[i] - static_cast<double>(y[first + i])) < 1e-12);
        CHECK(std::abs(dx[i] - static_cast<double>(gradients.dx[first + i])) < 1e-12);
      }
      for (std::size_t c = 0; c < layer_channels; ++c) {
        CHECK(layer.saved().inv_std[c] == doctest::Approx(static_cast<double>(oracle.inv_std[c])).epsilon(1e-14));
        CHECK(layer.running_var()[c] * layer.saved().inv_std[c] == doctest::Approx(1).epsilon(1e-14));
      }
    });
}

TEST_CASE("a layer may have gamma alone, or beta alone") {
  auto const x = test::noise_vector(4, 2 * rank_size), dy = test::noise_vector(5, 2 * rank_size);
  test::batch_norm_oracle const oracle{x, 2 * per_rank, layer_channels, layer_spatial, 1e-5};
  std::vector<double> const gamma{0.5, -2, 3}, beta{1, 2, -3}, none;
  for (auto const parts : {syncnorm::affine_parts::gamma, syncnorm::affine_parts::beta}) {
    bool const has_gamma = parts == syncnorm::affine_parts::gamma;
    auto const y = oracle.forward(x, has_gamma ? gamma : none, has_gamma ? none : beta);
    auto const gradients = oracle.backward(x, dy, has_gamma ? gamma : none);
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      layer_of_doubles layer{comm, layer_channels, {.parts = parts}};
      CHECK(layer.gamma().empty() == !has_gamma);
      CHECK(layer.gamma_grad().empty() == !has_gamma);
      CHECK(layer.beta().empty() == has_gamma);
      CHECK(layer.beta_grad().empty() == has_gamma);
      std::ranges::copy(gamma.begin(), gamma.begin() + std::ssize(layer.gamma()), layer.gamma().begin());
      std::ranges::copy(beta.begin(), beta.begin() + std::ssize(layer.beta()), layer.beta().begin());
      std::vector<double> own_y(rank_size), dx(rank_size);
      layer.forward(share(x, comm.rank()), view(own_y));
      layer.backward(share(x, comm.rank()), share(dy, comm.rank()), view(dx));
      auto const first = rank_size * static_cast<std::size_t>(comm.rank());
      for (std::size_t i = 0; i < rank_size; ++i) {
        CHECK(std::abs(own_y[i] - static_cast<double>(y[first + i])) < 1e-12);
        CHECK(std::abs(dx[i] - static_cast<double>(gradients.dx[first + i])) < 1e-12);
      }
      auto const local = oracle.parameter_gradients(x, dy, comm.rank() * per_rank, (comm.rank() + 1) * per_rank);
      for (std::size_t c = 0; c < layer_channels; ++c) {
        if (has_gamma) CHECK(layer.gamma_grad()[c] == doctest::Approx(static_cast<double>(local.gamma[c])));
        if (!has_gamma) CHECK(layer.beta_grad()[c] == doctest::Approx(static_cast<double>(local.beta[c])));
      }
    });
    // Ranks whose layers have different parts.
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      layer_of_doubles layer{
          comm, layer_channels, {.parts = comm.rank() == 0 ? parts : syncnorm::affine_parts::gamma_and_beta}};
      std::vector<double> own_y(rank_size);
      CHECK_THROWS_AS(layer.forward(share(x, comm.rank()), view(own_y)), syncnorm::mismatch_error);
    });
  }
}

TEST_CASE("gradients accumulate over local backward passes and one that exchanges") {
  // Two micro-steps: the first passes are local, the last exchanges. Parameter gradients are the same either way.
  auto const x = test::noise_vector(6, 2 * rank_size), dy = test::noise_vector(7, 2 * rank_size);
  test::batch_norm_oracle const oracle{x, 2 * per_rank, layer_channels, layer_spatial, 1e-5};
  auto const gradients = oracle.backward(x, dy, std::vector<double>{});
  syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
    layer_of_doubles layer{comm, layer_channels};
    std::vector<double> y(rank_size), dx(rank_size);
    for (bool const exchange : {false, false, true}) {
      layer.forward(share(x, comm.rank()), view(y));
      layer.backward(share(x, comm.rank()), share(dy, comm.rank()), view(dx), {.exchange = exchange});
    }
    auto const local = oracle.parameter_gradients(x, dy, comm.rank() * per_rank, (comm.rank() + 1) * per_rank);
    for (std::size_t c = 0; c < layer_channels; ++c) {
      CHECK(layer.gamma_grad()[c] == doctest::Approx(3 * static_cast<double>(local.gamma[c])).epsilon(1e-12));
      CHECK(layer.beta_grad()[c] == doctest::Approx(3 * static_cast<double>(local.beta[c])).epsilon(1e-12));
    }
    auto const first = rank_size * static_cast<std::size_t>(comm.rank());
    for (std::size_t i = 0; i < rank_size; ++i)
      CHECK(std::abs(dx[i] - static_cast<double>(gradients.dx[first + i])) < 1e-12);
  });
}

TEST_CASE("where all elements are equal and eps is 0, y is beta and x has no gradient") {
  syncnorm::run_ranks(2, [](thread_communicator const& comm) {
    layer_of_doubles layer{comm, layer_channels, {.norm = {.eps = 0}}};
    layer.beta()[1] = 2;
    std::vector<double> const x(rank_size, 7.0), dy = test::noise_vector(8, rank_size);
    std::vector<double> y(rank_size), dx(rank_size, 1.0);
    layer.forward(view(x), view(y));
    CHECK(view(y)(0, 0, 0) == 0);
    CHECK(view(y)(per_rank - 1, 1, 3) == 2);
    layer.backward(view(x), view(dy), view(dx));
    CHECK(std::ranges::all_of(dx, [](double value) { return value == 0; }));
  });
}
