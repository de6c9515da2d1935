#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <comm/without_members.hpp>
#include <ops/grid_case.hpp>
#include <support/message_of.hpp>
#include <support/oracle.hpp>
#include <support/sanitized.hpp>

namespace {

constexpr syncnorm::host::serial_executor one_thread{};

std::vector<double> deviates(std::uint64_t stream, std::size_t size, double mean = 0, double deviation = 1) {
  std::vector<double> values(size);
  // A uniform value in [-1, 1) has the deviation 1/sqrt(3).
  for (std::size_t i = 0; i < size; ++i) values[i] = mean + deviation * std::sqrt(3.0) * test::noise(stream, i);
  return values;
}

/// Forward of a batch `[N, C, S]` cut after `cut` samples over two ranks, and Σ dy·y as the loss of both.
double loss_of_two_ranks(std::vector<double> const& x, std::vector<double> const& dy, std::vector<double> const& gamma,
                         std::vector<double> const& beta, std::int64_t samples, std::int64_t cut,
                         std::int64_t spatial) {
  auto const channels = static_cast<std::int64_t>(gamma.size());
  std::vector<double> y(x.size());
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    auto const share = [&](auto& values) {
      auto const all = syncnorm::nchw(values.data(), samples, channels, spatial);
      return comm.rank() == 0 ? all.sample_range(0, cut) : all.sample_range(cut, samples - cut);
    };
    syncnorm::affine_parameters<double> const affine{gamma, beta};
    (void)syncnorm::batch_norm_forward(one_thread, comm, share(x), share(y), affine);
  });
  double loss = 0;
  for (std::size_t i = 0; i < y.size(); ++i) loss += dy[i] * y[i];
  return loss;
}

} // namespace

TEST_CASE("a layer that may not be changed shows its state, and running statistics start anew") {
  syncnorm::batch_norm<float> layer{{}, 2};
  std::vector<float> x{1, 2, 3, 5}, y(4);
  layer.forward(syncnorm::nc(x.data(), 2, 2), syncnorm::nc(y.data(), 2, 2));
  auto const& same = layer;
  auto const is = [](std::span<float const> values, float first, float second) {
    return values.size() == 2 && values[0] == first && values[1] == second;
  };
  CHECK((is(same.gamma(), 1, 1) && is(same.beta(), 0, 0) && is(same.gamma_grad(), 0, 0) && is(same.beta_grad(), 0, 0)));
  CHECK((same.running_mean()[0] == doctest::Approx(0.2) && same.running_mean()[1] == doctest::Approx(0.35)));
  CHECK((same.running_var()[0] == doctest::Approx(0.9 + 0.1 * 2) && same.num_batches_tracked() == 1));
  layer.reset_running_stats();
  CHECK((is(same.running_mean(), 0, 0) && is(same.running_var(), 1, 1) && same.num_batches_tracked() == 0));
}

TEST_CASE("gradients agree with finite differences over two ranks") {
  constexpr std::int64_t samples = 5, channels = 3, spatial = 4, cut = 2;
  auto x = deviates(1, samples * channels * spatial), gamma = deviates(2, channels, 1, 0.2);
  auto beta = deviates(3, channels);
  auto const dy = deviates(4, x.size());
  std::vector<double> dx(x.size()), gamma_grad(channels), beta_grad(channels), y(x.size());
  std::vector<double> rank_gamma(2 * channels), rank_beta(2 * channels);
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    auto const share = [&](auto& values) {
      auto const all = syncnorm::nchw(values.data(), samples, channels, spatial);
      return comm.rank() == 0 ? all.sample_range(0, cut) : all.sample_range(cut, samples - cut);
    };
    auto const part = static_cast<std::size_t>(comm.rank() * channels);
    syncnorm::affine_parameters<double> const affine{gamma, beta};
    auto const saved = syncnorm::batch_norm_forward(one_thread, comm, share(x), share(y), affine);
    syncnorm::affine_gradients<double> const gradients{std::span{rank_gamma}.subspan(part, channels),
                                                       std::span{rank_beta}.subspan(part, channels)};
    syncnorm::batch_norm_backward(one_thread, comm, share(dy), share(x), share(dx), affine, saved, gradients);
  });
  for (std::size_t c = 0; c < channels; ++c) {
    gamma_grad[c] = rank_gamma[c] + rank_gamma[channels + c];
    beta_grad[c] = rank_beta[c] + rank_beta[channels + c];
  }
  // Central differences: truncation of order step², rounding of order 1e-16/step, both below 1e-8 for values of order 1.
  constexpr double step = 1e-5, allowed = 1e-7;
  auto const check = [&](std::vector<double>& values, std::vector<double> const& gradient) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      double const kept = values[i];
      values[i] = kept + step;
      double const above = loss_of_two_ranks(x, dy, gamma, beta, samples, cut, spatial);
      values[i] = kept - step;
      double const below = loss_of_two_ranks(x, dy, gamma, beta, samples, cut, spatial);
      values[i] = kept;
      CHECK(std::abs((above - below) / (2 * step) - gradient[i]) < allowed);
    }
  };
  check(x, dx);
  check(gamma, gamma_grad);
  check(beta, beta_grad);
}

TEST_CASE("a large mean beside a small deviation keeps the variance") {
  struct large_mean {
    double mean, deviation;
  };
  for (auto const& given : {large_mean{1e4, 1}, large_mean{1e3, 1e-2}})
    for (auto const order : test::layouts) {
      constexpr int ranks = 3;
      std::int64_t const samples = 40, channels = 4, spatial = order == test::layout::nc ? 1 : 60;
      auto const values =
          deviates(7, static_cast<std::size_t>(ranks * samples * channels * spatial), given.mean, given.deviation);
      std::vector<float> const x(values.begin(), values.end());
      test::batch_norm_oracle const oracle{x, ranks * samples, channels, spatial, 0};

      // The textbook form in float must fail here, or the case shows nothing.
      float sum = 0, squares = 0;
      for (std::size_t n = 0; n < static_cast<std::size_t>(ranks * samples); ++n)
        for (std::size_t s = 0; s < static_cast<std::size_t>(spatial); ++s) {
          float const value = x[n * static_cast<std::size_t>(channels * spatial) + s];
          sum += value, squares += value * value;
        }
      auto const count = static_cast<float>(ranks * samples * spatial);
      auto const textbook = static_cast<double>(squares / count - sum / count * (sum / count));
      CHECK_FALSE(std::abs(textbook - static_cast<double>(oracle.var[0])) <= 1e-3 * static_cast<double>(oracle.var[0]));

      syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
        test::owned_tensor<float> local{order, samples, channels, spatial}, y{order, samples, channels, spatial};
        for (std::int64_t n = 0; n < samples; ++n)
          for (std::int64_t c = 0; c < channels; ++c)
            for (std::int64_t s = 0; s < spatial; ++s)
              local.view(n, c, s) =
                  x[static_cast<std::size_t>(((comm.rank() * samples + n) * channels + c) * spatial + s)];
        auto const saved = syncnorm::batch_norm_forward(one_thread, comm, local.view, y.view, {}, {}, {.eps = 0});
        for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
          double const variance = 1 / (saved.inv_std[c] * saved.inv_std[c]);
          double const expected = static_cast<double>(oracle.var[c]);
          CHECK(std::abs(variance - expected) < 1e-3 * expected);
        }
      });
    }
}

TEST_CASE("momentum empty is the cumulative average") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    syncnorm::batch_norm<double, syncnorm::thread_communicator> layer{comm, 2, {.norm = {.momentum = std::nullopt}}};
    std::vector<double> mean(2), var(2);
    constexpr int batches = 4;
    for (int b = 0; b < batches; ++b) {
      std::vector<double> const x = deviates(static_cast<std::uint64_t>(b), 2 * 3 * 2 * 5);
      std::vector<double> y(x.size());
      test::batch_norm_oracle const oracle{x, 6, 2, 5, 1e-5};
      auto const all = syncnorm::nchw(x.data(), 6, 2, 5);
      layer.forward(all.sample_range(comm.rank() * 3, 3), syncnorm::nchw(y.data(), 3, 2, 5));
      for (std::size_t c = 0; c < 2; ++c) {
        mean[c] += static_cast<double>(oracle.mean[c]) / batches;
        var[c] += static_cast<double>(oracle.var[c]) * 30 / 29 / batches;
      }
    }
    CHECK(layer.num_batches_tracked() == batches);
    for (std::size_t c = 0; c < 2; ++c) {
      CHECK(layer.running_mean()[c] == doctest::Approx(mean[c]).epsilon(1e-12));
      CHECK(layer.running_var()[c] == doctest::Approx(var[c]).epsilon(1e-12));
    }
  });
}

TEST_CASE("the biased running variance is kept on request") {
  auto const x = deviates(5, 4 * 1 * 3);
  test::batch_norm_oracle const oracle{x, 4, 1, 3, 1e-5};
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    std::vector<double> y(6);
    syncnorm::batch_norm<double, syncnorm::thread_communicator> layer{
        comm, 1, {.norm = {.momentum = 1.0, .variance = syncnorm::running_variance::biased}}};
    layer.forward(syncnorm::nchw(x.data(), 4, 1, 3).sample_range(2 * comm.rank(), 2),
                  syncnorm::nchw(y.data(), 2, 1, 3));
    CHECK(layer.running_var()[0] == doctest::Approx(static_cast<double>(oracle.var[0])).epsilon(1e-13));
  });
}

TEST_CASE("affine parameters and running statistics are optional") {
  auto const x = deviates(6, 2 * 4 * 3 * 2);
  test::batch_norm_oracle const oracle{x, 8, 3, 2, 1e-5};
  auto const expected = oracle.forward(x, std::vector<double>{}, std::vector<double>{});
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    syncnorm::batch_norm<double, syncnorm::thread_communicator> layer{
        comm, 3, {.affine = false, .track_running_stats = false}};
    CHECK(layer.gamma().empty());
    CHECK(layer.running_mean().empty());
    std::vector<double> y(4 * 3 * 2), dx(y.size());
    auto const own = syncnorm::nchw(x.data(), 8, 3, 2).sample_range(4 * comm.rank(), 4);
    auto const out = syncnorm::nchw(y.data(), 4, 3, 2);
    layer.forward(own, out);
    for (std::size_t i = 0; i < y.size(); ++i)
      CHECK(y[i] ==
            doctest::Approx(static_cast<double>(expected[i + y.size() * static_cast<std::size_t>(comm.rank())])));
    layer.backward(own, own, syncnorm::nchw(dx.data(), 4, 3, 2));
    auto const whole_dx = oracle.backward(x, x, std::vector<double>{}).dx;
    for (std::size_t i = 0; i < dx.size(); ++i)
      CHECK(dx[i] ==
            doctest::Approx(static_cast<double>(whole_dx[i + dx.size() * static_cast<std::size_t>(comm.rank())]))
                .epsilon(1e-9));

    // In evaluation mode it normalizes by its own batch, on this rank alone: only rank 0 calls it.
    layer.eval();
    if (comm.rank() != 0) return;
    layer.forward(own, out);
    std::vector<double> const share(x.begin(), x.begin() + 24);
    auto const alone = test::batch_norm_oracle{share, 4, 3, 2, 1e-5};
    auto const alone_y = alone.forward(share, std::vector<double>{}, std::vector<double>{});
    for (std::size_t i = 0; i < y.size(); ++i) CHECK(y[i] == doctest::Approx(static_cast<double>(alone_y[i])));
    layer.backward(own, own, syncnorm::nchw(dx.data(), 4, 3, 2));
    auto const alone_dx = alone.backward(share, share, std::vector<double>{}).dx;
    for (std::size_t i = 0; i < dx.size(); ++i)
      CHECK(dx[i] == doctest::Approx(static_cast<double>(alone_dx[i])).epsilon(1e-9));
    // Of ranks nothing is said then.
    auto const few = test_support::message_of<syncnorm::invalid_argument_error>(
        [&] { layer.forward(syncnorm::nchw(x.data(), 1, 3, 1), syncnorm::nchw(y.data(), 1, 3, 1)); });
    CHECK_MESSAGE(test_support::contains(few, "statistics of one rank need more than 1 value per channel"), few);
  });
}

TEST_CASE("ranks may need different gradients") {
  auto const x = deviates(8, 2 * 4 * 3 * 2), dy = deviates(9, x.size());
  std::vector<double> const gamma{1, 2, 3};
  test::batch_norm_oracle const oracle{x, 8, 3, 2, 1e-5};
  auto const expected = oracle.backward(x, dy, gamma);
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    auto const share = [&](auto& values) {
      return syncnorm::nchw(values.data(), 8, 3, 2).sample_range(4 * comm.rank(), 4);
    };
    std::vector<double> y(x.size()), dx(x.size(), -1);
    syncnorm::affine_parameters<double> const affine{gamma, {}};
    auto const saved = syncnorm::batch_norm_forward(one_thread, comm, share(x), share(y), affine);
    std::vector<double> gamma_grad(3, 100);
    if (comm.rank() == 0)
      syncnorm::batch_norm_backward(one_thread, comm, share(dy), share(x), {}, affine, saved,
                                    syncnorm::affine_gradients<double>{gamma_grad, {}});
    else
      syncnorm::batch_norm_backward(one_thread, comm, share(dy), share(x), share(dx), affine, saved);
    auto const local = oracle.parameter_gradients(x, dy, 0, 4);
    for (std::size_t c = 0; c < 3; ++c)
      CHECK(gamma_grad[c] ==
            doctest::Approx(comm.rank() == 0 ? 100 + static_cast<double>(local.gamma[c]) : 100).epsilon(1e-13));
    for (std::size_t i = 0; i < dx.size(); ++i) {
      bool const written = comm.rank() == 1 && i >= dx.size() / 2;
      CHECK(std::abs(dx[i] - (written ? static_cast<double>(expected.dx[i]) : -1)) < 1e-12);
    }
  });
}

TEST_CASE("a backward pass without exchange neglects the other ranks' gradients") {
  auto const x = deviates(10, 2 * 4 * 2 * 3), dy = deviates(11, x.size());
  std::vector<double> own_dy = dy;
  // The same as the exchanged backward pass in which rank 1 has zero gradients.
  std::fill(own_dy.begin() + static_cast<std::ptrdiff_t>(dy.size() / 2), own_dy.end(), 0.0);
  test::batch_norm_oracle const oracle{x, 8, 2, 3, 1e-5};
  auto const expected = oracle.backward(x, own_dy, std::vector<double>{});
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    auto const share = [&](auto& values) {
      return syncnorm::nchw(values.data(), 8, 2, 3).sample_range(4 * comm.rank(), 4);
    };
    std::vector<double> y(x.size()), dx(x.size());
    auto const saved = syncnorm::batch_norm_forward(one_thread, comm, share(x), share(y));
    if (comm.rank() != 0) return; // not collective: nobody waits for rank 1
    syncnorm::batch_norm_backward(one_thread, comm, share(dy), share(x), share(dx),
                                  syncnorm::affine_parameters<double>{}, saved, {}, {.exchange = false});
    for (std::size_t i = 0; i < dx.size() / 2; ++i)
      CHECK(std::abs(dx[i] - static_cast<double>(expected.dx[i])) < 1e-12);
  });
}

TEST_CASE("evaluation has a backward pass, by constant statistics") {
  auto const x = deviates(12, 6), dy = deviates(13, 6);
  std::vector<double> const gamma{2, 3}, mean{0.5, -1}, var{4, 0.25};
  std::vector<double> y(6), dx(6), gamma_grad(2), beta_grad(2);
  syncnorm::batch_norm_saved saved;
  syncnorm::affine_parameters<double> const affine{gamma, {}};
  auto const view = [](auto& values) { return syncnorm::nc(values.data(), 3, 2); };
  syncnorm::batch_norm_inference(one_thread, view(x), view(y), affine, mean, var, 1e-5, saved);
  syncnorm::batch_norm_backward(one_thread, syncnorm::self_communicator{}, view(dy), view(x), view(dx), affine, saved,
                                syncnorm::affine_gradients<double>{gamma_grad, beta_grad});
  for (std::size_t c = 0; c < 2; ++c) {
    double const inv_std = 1 / std::sqrt(var[c] + 1e-5);
    double sum = 0, sum_xmu = 0;
    for (std::size_t n = 0; n < 3; ++n) {
      CHECK(y[2 * n + c] == doctest::Approx(gamma[c] * (x[2 * n + c] - mean[c]) * inv_std).epsilon(1e-13));
      CHECK(dx[2 * n + c] == doctest::Approx(gamma[c] * inv_std * dy[2 * n + c]).epsilon(1e-13));
      sum += dy[2 * n + c], sum_xmu += dy[2 * n + c] * (x[2 * n + c] - mean[c]) * inv_std;
    }
    CHECK(gamma_grad[c] == doctest::Approx(sum_xmu).epsilon(1e-12));
    CHECK(beta_grad[c] == doctest::Approx(sum).epsilon(1e-12));
  }
}

TEST_CASE("where all elements are equal and eps is 0, outputs are beta in training and in evaluation") {
  for (auto const kind : {syncnorm::running_variance::unbiased, syncnorm::running_variance::standard_deviation}) {
    syncnorm::batch_norm<double> layer{{}, 2, {.norm = {.eps = 0, .momentum = 1, .variance = kind}}};
    std::ranges::fill(layer.beta(), 0.25);
    std::vector<double> x(12, 0.1), y(12), dx(12);
    auto const given = syncnorm::nchw(x.data(), 3, 2, 2), out = syncnorm::nchw(y.data(), 3, 2, 2);
    for (bool const trains : {true, false}) {
      layer.train(trains);
      layer.forward(given, out);
      CHECK(y == std::vector(12, 0.25));
      layer.backward(given, given, syncnorm::nchw(dx.data(), 3, 2, 2));
      CHECK(dx == std::vector(12, 0.0));
    }
  }
}

TEST_CASE("where statistics are constant, dx is what dy is, whatever x is") {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (auto const& shape : {std::array<std::int64_t, 3>{2, 3, 5}, {3, 40, 20}, {64, 64, 300}})
    for (bool const rows : {true, false})
      for (auto const& kind : {syncnorm::activation::identity(), syncnorm::activation::relu()})
        for (bool const masked : {false, true})
          for (bool const with_residual : {false, true}) {
            std::int64_t const n = shape[0], c = shape[1], s = shape[2];
            if (test::sanitized && n == 64 && !(masked && with_residual && !kind.is_identity())) continue;
            auto const size = static_cast<std::size_t>(n * c * s);
            std::vector<float> x(size), y(size), dy(size), dx(size), residual(size, 0.5F), dresidual(size);
            std::vector<std::uint8_t> mask(static_cast<std::size_t>(n * s), 1);
            mask[1] = 0;
            for (std::size_t i = 0; i < size; ++i) {
              x[i] = std::array{1.0F, nan, inf}[i % 3];
              dy[i] = i % 3 == 0 ? 2.0F : 0.0F;
            }
            auto const view = [&](auto& values) {
              return rows ? syncnorm::nchw(values.data(), n, c, s) : syncnorm::nhwc(values.data(), n, c, s);
            };
            syncnorm::batch_norm_epilogue<float> epilogue{.activation = kind};
            if (with_residual) epilogue.residual = view(std::as_const(residual));
            if (masked) epilogue.mask = syncnorm::mask_of(std::as_const(mask).data(), n, s);
            for (bool const affine : {true, false}) { // without, nobody needs the sums
              std::ranges::fill(dx, -1.0F), std::ranges::fill(dresidual, -1.0F);
              syncnorm::batch_norm<float> layer{syncnorm::self_communicator{}, c, {.affine = affine}};
              layer.eval();
              layer.forward(view(x), view(y), epilogue);
              layer.backward(view(x), view(dy), view(dx), epilogue,
                             with_residual ? view(dresidual) : decltype(view(dx)){});
              std::size_t wrong = 0;
              for (std::size_t i = 0; i < size; ++i) {
                wrong += !(std::abs(dx[i] - dy[i] / std::sqrt(1 + 1e-5F)) < 1e-6F);
                if (with_residual) wrong += dresidual[i] != dy[i];
              }
              CHECK(wrong == 0);
            }
          }
}

TEST_CASE("y may be x, and dx may be dy") {
  auto const x = deviates(14, 4 * 3 * 5), dy = deviates(15, x.size());
  auto in_place = x, gradient = dy;
  std::vector<double> y(x.size()), dx(x.size());
  auto const view = [](auto& values) { return syncnorm::nhwc(values.data(), 4, 3, 5); };
  syncnorm::self_communicator const self;
  auto const saved = syncnorm::batch_norm_forward(one_thread, self, view(x), view(y));
  (void)syncnorm::batch_norm_forward(one_thread, self, view(in_place), view(in_place));
  CHECK(in_place == y);
  syncnorm::affine_parameters<double> const affine;
  syncnorm::batch_norm_backward(one_thread, self, view(dy), view(x), view(dx), affine, saved);
  syncnorm::batch_norm_backward(one_thread, self, view(gradient), view(x), view(gradient), affine, saved);
  CHECK(gradient == dx);
}

TEST_CASE("a batch that is empty on every rank changes nothing") {
  syncnorm::run_ranks(3, [](syncnorm::thread_communicator const& comm) {
    syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, 200};
    syncnorm::tensor_view<float> const empty = syncnorm::nchw<float>(nullptr, 0, 200, 7);
    for (int step = 0; step < 2; ++step) {
      layer.forward(empty, empty);
      layer.backward(empty, empty, empty);
    }
    CHECK(layer.num_batches_tracked() == 0);
    for (float const value : layer.running_mean()) CHECK(value == 0.0F);
    for (float const value : layer.running_var()) CHECK(value == 1.0F);
    for (float const value : layer.gamma_grad()) CHECK(value == 0.0F);
  });
}

TEST_CASE("statistics span a subgroup of the ranks") {
  auto const x = deviates(16, 4 * 2 * 2 * 3), dy = deviates(17, x.size());
  syncnorm::run_ranks(4, [&](syncnorm::thread_communicator const& world) {
    auto const pair = syncnorm::split(world, world.rank() / 2);
    std::vector<double> y(2 * 2 * 3), dx(y.size());
    auto const share = [&](std::vector<double> const& of) {
      return syncnorm::nchw(of.data(), 8, 2, 3).sample_range(2 * world.rank(), 2);
    };
    auto const saved = syncnorm::batch_norm_forward(one_thread, pair, share(x), syncnorm::nchw(y.data(), 2, 2, 3));
    syncnorm::batch_norm_backward(one_thread, pair, share(dy), share(x), syncnorm::nchw(dx.data(), 2, 2, 3),
                                  syncnorm::affine_parameters<double>{}, saved);
    auto const of_pair = [&](std::vector<double> const& all) {
      auto const begin = all.begin() + world.rank() / 2 * 24;
      return std::vector<double>(begin, begin + 24);
    };
    test::batch_norm_oracle const oracle{of_pair(x), 4, 2, 3, 1e-5};
    for (std::size_t c = 0; c < 2; ++c)
      CHECK(saved.mean[c] == doctest::Approx(static_cast<double>(oracle.mean[c])).epsilon(1e-13));
    auto const expected_y = oracle.forward(of_pair(x), std::vector<double>{}, std::vector<double>{});
    auto const expected_dx = oracle.backward(of_pair(x), of_pair(dy), std::vector<double>{}).dx;
    auto const first = y.size() * static_cast<std::size_t>(world.rank() % 2);
    for (std::size_t i = 0; i < y.size(); ++i) {
      CHECK(std::abs(y[i] - static_cast<double>(expected_y[first + i])) < 1e-12);
      CHECK(std::abs(dx[i] - static_cast<double>(expected_dx[first + i])) < 1e-12);
    }
  });
}

TEST_CASE("a communicator that has traits in place of members serves a layer") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    auto const x = deviates(20 + static_cast<std::uint64_t>(comm.rank()), 3 * 2 * 5), dy = deviates(22, x.size());
    auto const step = [&](auto const& over) {
      std::vector<double> y(x.size()), dx(x.size());
      auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 3, 2, 5); };
      syncnorm::batch_norm<double, std::remove_cvref_t<decltype(over)>> layer{over, 2};
      layer.forward(view(x), view(y));
      layer.backward(view(x), view(dy), view(dx));
      y.insert(y.end(), dx.begin(), dx.end());
      return y;
    };
    CHECK(step(contract::without_members{&comm}) == step(comm));
  });
}
