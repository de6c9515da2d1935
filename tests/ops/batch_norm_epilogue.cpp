#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>

#include <ops/epilogue_cases.hpp>
#include <ops/quick_communicator.hpp>
#include <support/message_of.hpp>
#include <support/sanitized.hpp>

using syncnorm::activation;
using syncnorm::batch_norm_epilogue;
using syncnorm::nchw;
using syncnorm::run_ranks;
using syncnorm::tensor_view;
using syncnorm::thread_communicator;

namespace {

using layer_over_threads = syncnorm::batch_norm<double, thread_communicator>;

} // namespace

TEST_CASE_TEMPLATE("epilogues and masks agree with the oracle on the whole batch", T, float,
                   syncnorm::bfloat16 AND_UNSANITIZED(double, syncnorm::float16)) {
  for (int const ranks : {1, 2, 3}) {
    std::size_t turn = static_cast<std::size_t>(ranks), cells = 0;
    for (auto const order : test::layouts)
      for (auto const spread : test::partitions)
        for (std::int64_t const channels : {3, 140}) {
          if (test::sanitized && cells++ % 7 > 0) continue;
          std::int64_t const spatial = order == test::layout::nc ? 1 : channels == 3 ? 37 : 9;
          for (int k = 0; k < (test::sanitized ? 1 : 3); ++k) {
            auto const& choice = test::epilogue_choices[turn++ % test::epilogue_choices.size()];
            test::epilogue_case<T> const data{{ranks, channels, 5, spatial, spread, order}, choice};
            if (data.oracle.count == 1) continue;
            run_ranks(ranks, [&](thread_communicator const& comm) {
              for (auto const& failure : test::run_epilogue_case(data, comm)) FAIL_CHECK(failure);
            });
          }
          ++turn;
        }
  }
}

TEST_CASE("layers beyond the cache are exchanged in parts with their epilogues") {
  for (std::size_t k = 1; k < test::epilogue_choices.size(); k += test::sanitized ? 9 : 2) {
    auto const& choice = test::epilogue_choices[k];
    test::epilogue_case<float> const data{
        {2, test::sanitized ? 5 : 13, 8, 4096, test::partition::uneven, test::layout::nchw}, choice};
    double const overhead = k % 4 == 1 ? 0 : 7e-6; // into blocks, or into halves
    run_ranks(2, [&](thread_communicator const& threads) {
      test::quick_communicator const comm{threads, overhead};
      for (auto const& failure : test::run_epilogue_case(data, comm, true)) FAIL_CHECK(failure);
    });
  }
}

TEST_CASE("gradients through epilogues and masks agree with finite differences over two ranks") {
  constexpr std::int64_t samples = 5, channels = 2, spatial = 6, cut = 2;
  constexpr auto size = static_cast<std::size_t>(samples * channels * spatial);
  for (auto const& choice : test::epilogue_choices) {
    if (choice.mask == test::epilogue_choice::none) continue;
    CAPTURE(choice.name());
    auto x = test::noise_vector(11, size), residual = test::noise_vector(12, size);
    auto const dy = test::noise_vector(13, size);
    std::vector<double> gamma{0.75, -1.25}, beta{0.125, -0.25};
    std::vector<std::uint8_t> mask;
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t s = 0; s < spatial; ++s)
        mask.push_back(choice.mask == test::epilogue_choice::all || (n * 7 + s * 3) % 5 < 3 ? 1 : 0);
    auto const share = [&](auto& values, int rank) {
      auto const all = nchw(values.data(), samples, channels, spatial);
      return rank == 0 ? all.sample_range(0, cut) : all.sample_range(cut, samples - cut);
    };
    auto const epilogue_of = [&](int rank) {
      batch_norm_epilogue<double> epilogue{.activation = choice.activation()};
      if (choice.residual) epilogue.residual = share(residual, rank);
      epilogue.mask = rank == 0 ? syncnorm::mask_of(mask.data(), cut, spatial)
                                : syncnorm::mask_of(mask.data() + cut * spatial, samples - cut, spatial);
      if (choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;
      return epilogue;
    };
    auto const prepare = [&](layer_over_threads& layer) {
      std::ranges::copy(gamma, layer.gamma().begin());
      std::ranges::copy(beta, layer.beta().begin());
    };
    std::vector<double> y(size), dx(size), dresidual(size), gamma_grad(4), beta_grad(4);
    auto const loss = [&] {
      run_ranks(2, [&](thread_communicator const& comm) {
        layer_over_threads layer{comm, channels};
        prepare(layer);
        layer.forward(share(x, comm.rank()), share(y, comm.rank()), epilogue_of(comm.rank()));
      });
      double sum = 0;
      for (std::size_t i = 0; i < size; ++i) sum += dy[i] * y[i];
      return sum;
    };
    run_ranks(2, [&](thread_communicator const& comm) {
      layer_over_threads layer{comm, channels};
      prepare(layer);
      auto const epilogue = epilogue_of(comm.rank());
      layer.forward(share(x, comm.rank()), share(y, comm.rank()), epilogue);
      layer.backward(share(x, comm.rank()), share(dy, comm.rank()), share(dx, comm.rank()), epilogue,
                     choice.residual ? share(dresidual, comm.rank()) : tensor_view<double>{});
      for (std::size_t c = 0; c < 2; ++c) {
        gamma_grad[static_cast<std::size_t>(comm.rank()) * 2 + c] = layer.gamma_grad()[c];
        beta_grad[static_cast<std::size_t>(comm.rank()) * 2 + c] = layer.beta_grad()[c];
      }
    });
    // Values of order 1: truncation of order step², rounding of order 1e-16/step. No value is that near to a kink.
    constexpr double step = 1e-5, allowed = 1e-7;
    auto const check = [&](double& value, double gradient) {
      double const kept = value;
      value = kept + step;
      double const above = loss();
      value = kept - step;
      double const below = loss();
      value = kept;
      CHECK(std::abs((above - below) / (2 * step) - gradient) < allowed);
    };
    for (std::size_t i = 0; i < size; i += 3) check(x[i], dx[i]);
    for (std::size_t i = 0; choice.residual && i < size; i += 5) check(residual[i], dresidual[i]);
    for (std::size_t c = 0; c < 2; ++c) {
      check(gamma[c], gamma_grad[c] + gamma_grad[2 + c]);
      check(beta[c], beta_grad[c] + beta_grad[2 + c]);
    }
  }
}

TEST_CASE("what is wrong with an epilogue on one rank is thrown on every rank, and nothing changes") {
  struct fault {
    std::function<void(batch_norm_epilogue<double>&)> make;
    std::string text;
  };
  std::vector<double> values(2 * 3 * 4, 1.0);
  std::vector<std::uint8_t> const ones(2 * 4, 1);
  std::vector<fault> const faults{
      {[&](auto& e) { e.mask = syncnorm::mask_of(ones.data(), 4, 2); },
       "rank 1: the mask is [4, 2], expected [2, 4]: a position for each"},
      {[&](auto& e) { e.mask = syncnorm::mask_of(static_cast<std::uint8_t const*>(nullptr), 2, 4); },
       "rank 1: the mask is null"},
      {[&](auto& e) {
         e.mask = {ones.data(), 2, 4, std::numeric_limits<std::int64_t>::min(), 1};
       },
       "rank 1: the mask has the strides [-9223372036854775808, 1], which no memory has room for"},
      {[&](auto& e) { e.residual = nchw<double const>(values.data(), 2, 3, 3); },
       "rank 1: the residual is [2, 3, 3], expected [2, 3, 4] as x"},
      {[&](auto& e) { e.residual = nchw<double const>(nullptr, 2, 3, 4); }, "rank 1: the residual is null"},
      {[&](auto& e) { e.activation = activation::leaky_relu(std::numeric_limits<double>::quiet_NaN()); },
       "rank 1: the negative slope of the activation is nan"},
  };
  for (auto const& each : faults) {
    auto const& make = each.make;
    auto const& text = each.text;
    CAPTURE(text);
    run_ranks(2, [&](thread_communicator const& comm) {
      std::vector<double> own(values.size());
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = test::noise(1, i);
      auto const view = nchw(own.data(), 2, 3, 4);
      layer_over_threads layer{comm, 3};
      batch_norm_epilogue<double> epilogue;
      if (comm.rank() == 1) make(epilogue);
      auto const forward =
          test_support::message_of<syncnorm::invalid_argument_error>([&] { layer.forward(view, view, epilogue); });
      CHECK_MESSAGE(forward.find(text) != std::string::npos, forward);
      CHECK(layer.num_batches_tracked() == 0);
      CHECK(layer.running_mean()[0] == 0);
      std::vector<double> y(own.size());
      layer.forward(view, nchw(y.data(), 2, 3, 4)); // the communicator is as usable as before
      auto const backward = test_support::message_of<syncnorm::invalid_argument_error>(
          [&] { layer.backward(view, view, view, epilogue, {}); });
      CHECK_MESSAGE(backward.find(text) != std::string::npos, backward);
      CHECK(layer.beta_grad()[0] == 0);
      if (comm.rank() == 1) {
        layer.eval();
        auto const inference =
            test_support::message_of<syncnorm::invalid_argument_error>([&] { layer.forward(view, view, epilogue); });
        CHECK_MESSAGE(inference.find(text.substr(8)) != std::string::npos, inference);
        std::array<syncnorm::tensor_view<double const>, 2> const x{view, view};
        std::array const to{view, view};
        std::array const epilogues{batch_norm_epilogue<double>{}, epilogue};
        auto const of_batches =
            test_support::message_of<syncnorm::invalid_argument_error>([&] { layer.forward(x, to, epilogues); });
        CHECK_MESSAGE(of_batches.find(std::isnan(epilogue.activation.negative_slope) ? "is nan" : "[1]") !=
                          std::string::npos,
                      of_batches);
      }
    });
  }

  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<double> own(values.size(), 1.0), out(values.size());
    own[0] = comm.rank();
    auto const view = nchw(own.data(), 2, 3, 4), to = nchw(out.data(), 2, 3, 4);
    layer_over_threads layer{comm, 3};
    layer.forward(view, to);
    std::string what;
    try {
      layer.backward(view, view, to, {}, comm.rank() == 0 ? nchw(out.data(), 2, 3, 4) : tensor_view<double>{});
    } catch (syncnorm::invalid_argument_error const& error) {
      what = error.what();
    }
    CHECK(what.find("rank 0: the gradient of a residual is asked for") != std::string::npos);
  });
}

TEST_CASE_TEMPLATE("a backward pass needs nothing of a residual that is not activated", T, float, double) {
  constexpr std::int64_t channels = 3, spatial = 40;
  for (bool const masked : {false, true})
    for (bool const alone : {false, true})
      run_ranks(alone ? 1 : 2, [&](thread_communicator const& comm) {
        CAPTURE(masked);
        std::vector<T> x(2 * channels * spatial), dy(x.size()), residual(x.size(), T{3}), y(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {
          x[i] = static_cast<T>(test::noise(1, i)) + static_cast<T>(comm.rank());
          dy[i] = static_cast<T>(test::noise(2, i));
        }
        std::vector<std::uint8_t> mask(2 * spatial, 1);
        mask[7] = 0;
        auto const view = [&](std::vector<T>& of) { return nchw(of.data(), 2, channels, spatial); };
        batch_norm_epilogue<T> epilogue{.residual = view(residual)};
        if (masked) epilogue.mask = syncnorm::mask_of(mask.data(), 2, spatial);
        auto const step = [&](T anything) {
          std::ranges::fill(residual, T{3});
          syncnorm::batch_norm<T, thread_communicator> layer{comm, channels};
          layer.forward(view(x), view(y), epilogue);
          std::ranges::fill(residual, anything);
          std::vector<T> dx(x.size()), dresidual(x.size());
          layer.backward(view(x), view(dy), view(dx), epilogue, view(dresidual));
          CHECK(dresidual == dy);
          return dx;
        };
        CHECK(step(3) == step(std::numeric_limits<T>::quiet_NaN()));
      });
}

TEST_CASE_TEMPLATE("what is no number is none behind an exponential, in gradients, too", T, float, double,
                   syncnorm::bfloat16) {
  for (std::int64_t const spatial : {1, 5, 83})
    for (bool const channels_last : {false, true}) {
      CAPTURE(spatial);
      CAPTURE(channels_last);
      constexpr std::int64_t channels = 2;
      auto const view = [&](std::vector<T>& of) {
        return channels_last ? syncnorm::nhwc(of.data(), 2, channels, spatial) : nchw(of.data(), 2, channels, spatial);
      };
      std::vector<T> x(static_cast<std::size_t>(2 * channels * spatial), T{-1}), y(x), dx(x);
      view(x)(1, 1, spatial / 2) = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
      syncnorm::batch_norm<T> layer{{}, channels};
      layer.eval();
      batch_norm_epilogue<T> const epilogue{.activation = activation::elu()};
      layer.forward(view(x), view(y), epilogue);
      layer.backward(view(x), view(x), view(dx), epilogue, {});
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t c = 0; c < channels; ++c)
          for (std::int64_t s = 0; s < spatial; ++s) {
            bool const given = n == 1 && c == 1 && s == spatial / 2;
            CHECK(std::isnan(static_cast<double>(view(y)(n, c, s))) == given);
            CHECK(std::isnan(static_cast<double>(view(dx)(n, c, s))) == given);
          }
      CHECK(std::isfinite(layer.beta_grad()[0]));
      CHECK(std::isnan(layer.beta_grad()[1]));
      CHECK(std::isnan(layer.gamma_grad()[1]));
    }
}

TEST_CASE("one position that counts over all ranks cannot be trained on") {
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<double> own(8, 1.0);
    std::vector<std::uint8_t> mask(4, 0);
    if (comm.rank() == 1) mask[2] = 1;
    layer_over_threads layer{comm, 2};
    batch_norm_epilogue<double> epilogue;
    epilogue.mask = syncnorm::mask_of(mask.data(), 1, 4);
    CHECK_THROWS_AS(layer.forward(nchw(own.data(), 1, 2, 4), nchw(own.data(), 1, 2, 4), epilogue),
                    syncnorm::invalid_argument_error);
  });
}

TEST_CASE("micro-batches, passes in two phases and the reduce policy take epilogues") {
  constexpr std::int64_t channels = 5, spatial = 12;
  for (auto const& choice : test::epilogue_choices) {
    CAPTURE(choice.name());
    test::epilogue_case<double> const data{{2, channels, 6, spatial, test::partition::even, test::layout::nchw},
                                           choice};
    auto const gradients = data.oracle.backward(data.wide(data.dy), 0, 12);
    run_ranks(2, [&](thread_communicator const& comm) {
      auto const first = data.cell.first_sample_of(comm.rank());
      // Two micro-batches of 2 and 4 samples.
      auto const part = [&](auto& values, std::int64_t k) {
        auto const all = nchw(values.data(), 12, channels, spatial);
        return k == 0 ? all.sample_range(first, 2) : all.sample_range(first + 2, 4);
      };
      auto x = data.x, dy = data.dy, residual = data.residual;
      residual.resize(x.size());
      std::vector<double> y(x.size()), dx(x.size()), dresidual(x.size());
      std::vector<batch_norm_epilogue<double>> epilogues(2);
      for (std::int64_t k = 0; k < 2; ++k) {
        auto& epilogue = epilogues[static_cast<std::size_t>(k)];
        epilogue.activation = choice.activation();
        if (choice.residual) epilogue.residual = part(residual, k);
        if (!data.mask.empty())
          epilogue.mask = syncnorm::mask_of(data.mask.data() + (first + 2 * k) * spatial, 2 + 2 * k, spatial);
        if (choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;
      }
      using inputs = std::array<tensor_view<double const>, 2>;
      using outputs = std::array<tensor_view<double>, 2>;
      inputs const xs{part(x, 0), part(x, 1)}, dys{part(dy, 0), part(dy, 1)};
      outputs const ys{part(y, 0), part(y, 1)}, dxs{part(dx, 0), part(dx, 1)},
          drs{part(dresidual, 0), part(dresidual, 1)};
      for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
        for (bool const phases : {false, true}) {
          std::ranges::fill(y, -9), std::ranges::fill(dx, -9), std::ranges::fill(dresidual, -9);
          auto norm = data.norm();
          norm.exchange = policy;
          layer_over_threads layer{comm, channels, {.norm = norm}};
          std::ranges::copy(data.gamma, layer.gamma().begin());
          std::ranges::copy(data.beta, layer.beta().begin());
          std::span<tensor_view<double> const> const wanted{drs.data(), choice.residual ? 2U : 0U};
          if (phases) {
            syncnorm::batch_norm_group group{comm};
            group.run(syncnorm::passes(layer.plan_forward(xs, ys, epilogues)));
            group.run(syncnorm::passes(layer.plan_backward(xs, dys, dxs, epilogues, wanted)));
          } else {
            layer.forward(xs, ys, epilogues);
            layer.backward(xs, dys, dxs, epilogues, wanted);
          }
          auto const check = [&](std::vector<double> const& got, std::vector<long double> const& expected) {
            test::comparison all{1};
            auto const begin = static_cast<std::size_t>(first * channels * spatial);
            for (auto i = begin; i < begin + 6 * channels * spatial; ++i) all.add(got[i], expected[i]);
            CHECK_MESSAGE(all.within(1e-12), all.text());
          };
          check(y, data.oracle.y);
          check(dx, gradients.dx);
          if (choice.residual) check(dresidual, gradients.dresidual);
          CHECK(layer.saved().count == data.oracle.count);
        }
    });
  }
}
