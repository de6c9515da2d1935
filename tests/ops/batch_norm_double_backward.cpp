#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/double_backward_cases.hpp>
#include <ops/pending_cases.hpp>
#include <support/message_of.hpp>
#include <support/sanitized.hpp>

using syncnorm::exchange_policy;
using syncnorm::thread_communicator;

TEST_CASE("double backward agrees with differences of the backward pass, over uneven and empty ranks") {
  for (auto const& shares : std::vector<std::vector<std::int64_t>>{{3}, {2, 3}, {0, 3, 1}, {1, 0, 2, 0}})
    for (int what = 0; what < 4; ++what) {
      test::second_order_case problem{shares};
      problem.has_gamma = what != 1;
      problem.has_u = what != 2;
      problem.has_ab = what != 3;
      problem.unbiased = shares.size() == 3 || shares.size() == 1;
      for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
        syncnorm::run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
          for (auto const& failure : test::check_double_backward(comm, problem, policy)) FAIL_CHECK(failure);
        });
    }
  for (auto const order : test::layouts) {
    test::second_order_case problem{{2, 1}};
    if (order == test::layout::nc)
      problem = [] {
        test::second_order_case flat{{6, 3}};
        flat.spatial = 1;
        return flat;
      }();
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      for (auto const& failure : test::check_double_backward(comm, problem, exchange_policy::automatic, order))
        FAIL_CHECK(failure);
    });
  }
}

TEST_CASE("double backward through epilogues, masks and micro-batches agrees with differences of the oracle") {
  struct choice {
    double slope;
    bool residual, masks, zeroes;
  };
  for (auto const& shares : std::vector<std::vector<std::int64_t>>{{3}, {2, 3}, {0, 3, 1}})
    for (auto const& chosen : {choice{0, false, false, false},
                               {0.25, true, false, false},
                               {1, false, true, false},
                               {-0.5, true, true, true},
                               {0.1, true, true, false},
                               {1, false, true, true}})
      for (std::int64_t const batches : {1, 3}) {
        test::second_order_case problem{shares};
        problem.batches = batches;
        problem.unbiased = chosen.residual;
        problem.with_epilogue(chosen.slope, chosen.residual, chosen.masks, chosen.zeroes);
        auto const order = chosen.slope == 0.25 ? test::layout::nhwc : test::layout::nchw;
        auto const policy = chosen.zeroes ? exchange_policy::reduce : exchange_policy::gather;
        INFO("slope ", chosen.slope, ", mask ", chosen.masks, ", zeroes ", chosen.zeroes, ", batches ", batches);
        syncnorm::run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
          for (auto const& failure : test::check_double_backward(comm, problem, policy, order)) FAIL_CHECK(failure);
        });
      }
  // Without u; and micro-batches without an epilogue.
  test::second_order_case without_u{{2, 3}}, plain{{4, 2}};
  without_u.with_epilogue(0.25, true, true, true);
  without_u.has_u = false;
  plain.batches = 2;
  for (auto const& problem : {without_u, plain})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      for (auto const& failure : test::check_double_backward(comm, problem, exchange_policy::gather))
        FAIL_CHECK(failure);
    });
}

TEST_CASE("double backward needs nothing of positions whose outputs are 0, nor memory for what is not wanted") {
  std::vector<unsigned char> const mask{1, 0, 1, 1};
  auto const run = [&](double garbage) {
    std::vector<double> x{1, garbage, 3, -2}, dy{0.5, garbage, -1, 2}, u{2, garbage, 1, -1}, y(4), to_dy(4), to_x(4);
    auto const view = [](std::vector<double>& values) { return syncnorm::nchw(values.data(), 2, 1, 2); };
    syncnorm::batch_norm<double> layer{{}, 1};
    syncnorm::batch_norm_epilogue<double> const epilogue{.activation = syncnorm::activation::leaky_relu(0.5),
                                                         .mask = syncnorm::mask_of(mask.data(), 2, 2),
                                                         .masked = syncnorm::masked_outputs::zero};
    layer.forward(view(x), view(y), epilogue);
    layer.double_backward({.dx = view(u)}, view(x), view(dy), view(to_dy), view(to_x), epilogue);
    auto const both = to_x;
    // The gradient to x alone, and x back in place.
    layer.forward_in_place(view(x), epilogue);
    std::vector<double> dx(4);
    layer.backward_in_place(view(x), view(dy), view(dx), epilogue);
    layer.double_backward({.dx = view(u)}, view(x), view(dy), {}, view(to_x), epilogue);
    for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(to_x[i] - both[i]) < 1e-12);
    CHECK(to_dy[1] == 0);
    CHECK(both[1] == 0);
    to_dy.insert(to_dy.end(), both.begin(), both.end());
    return to_dy;
  };
  CHECK(run(0.25) == run(std::nan("")));
}

TEST_CASE("double backward with a workspace of its own takes the epilogue of its passes, too") {
  std::vector<double> x{1, 4, 3, -2}, dy{0.5, 2, -1, 2}, u{2, 1, 1, -1}, y(4), to_dy(4), to_x(4), by_layer(4);
  auto const view = [](std::vector<double>& values) { return syncnorm::nchw(values.data(), 2, 1, 2); };
  syncnorm::batch_norm_epilogue<double> const epilogue{.activation = syncnorm::activation::leaky_relu(0.25)};
  syncnorm::self_communicator const comm;
  syncnorm::batch_norm<double> layer{comm, 1};
  layer.forward(view(x), view(y), epilogue);
  layer.double_backward({.dx = view(u)}, view(x), view(dy), view(to_dy), view(by_layer), epilogue);
  auto const saved = syncnorm::batch_norm_forward<double>(syncnorm::host::serial_executor{}, comm, view(x), view(y), {},
                                                          {}, {}, epilogue);
  syncnorm::batch_norm_double_backward<double>(syncnorm::host::serial_executor{}, comm, {.dx = view(u)}, view(dy),
                                               view(x), {}, saved, view(to_dy), view(to_x), {}, {}, epilogue);
  CHECK(to_x == by_layer);
  syncnorm::batch_norm_double_backward<double>(syncnorm::host::serial_executor{}, comm, {.dx = view(u)}, view(dy),
                                               view(x), {}, saved, view(to_dy), view(to_x));
  CHECK(to_x != by_layer);
}

TEST_CASE("what is not given to double backward is not another times 0, so infinities stay where they are") {
  double const infinity = std::numeric_limits<double>::infinity();
  auto const bits = [](std::vector<double> const& values, double expected) {
    return std::ranges::all_of(values, [&](double value) { return value == expected; });
  };
  for (bool const masked : {false, true})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      std::vector<double> x{1, 2, 3, -2}, dy{0.5, infinity, -1, 2}, u{2, 1, -1, 3}, y(4), to_dy(4, 7.0), to_x(4, 7.0);
      std::vector<double> const b{0.75};
      std::vector<unsigned char> const mask{1, 1, 0, 1};
      syncnorm::batch_norm_epilogue<double> epilogue;
      if (masked) epilogue.mask = syncnorm::mask_of(mask.data(), 2, 2);
      auto const view = [](std::vector<double>& values) { return syncnorm::nchw(values.data(), 2, 1, 2); };
      syncnorm::batch_norm<double, thread_communicator> layer{comm, 1};
      layer.forward(view(x), view(y), epilogue);
      // Of the gradient of beta alone, which is linear in dy.
      layer.double_backward({.beta_gradient = b}, view(x), view(dy), view(to_dy), view(to_x), epilogue);
      CHECK(bits(to_dy, 0.75));
      CHECK(bits(to_x, 0));
      CHECK(layer.gamma_grad()[0] == 0);

      // By constant statistics dx is a multiple of dy alone.
      layer.eval();
      layer.running_var()[0] = 1 - 1e-5;
      layer.gamma()[0] = 2;
      x[1] = infinity;
      layer.forward(view(x), view(y), epilogue);
      layer.double_backward({.dx = view(u)}, view(x), view(dy), view(to_dy), view(to_x), epilogue);
      for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(to_dy[i] - 2 * u[i]) < 1e-12);
      CHECK(bits(to_x, 0));
    });
}

TEST_CASE("double backward in blocks of channels gives the bits of that of all at once") {
  // Of a size that is taken in blocks by one thread, and by two not.
  struct two_threads : syncnorm::host::serial_executor {
    static int concurrency() { return 7; }
  };
  std::int64_t const samples = 3, channels = 65, spatial = 3001;
  auto const make = [&](std::uint64_t stream) {
    std::vector<float> values(static_cast<std::size_t>(samples * channels * spatial));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(test::noise(stream, i));
    return values;
  };
  auto x = make(1), dy = make(2), u = make(3), residual = make(4);
  std::vector<unsigned char> mask(static_cast<std::size_t>(samples * spatial), 1);
  for (std::size_t i = 0; i < mask.size(); i += 3) mask[i] = 0;
  auto const view = [&](std::vector<float>& values) {
    return syncnorm::nchw(values.data(), samples, channels, spatial);
  };
  for (bool const with : {false, true}) {
    syncnorm::batch_norm_epilogue<float> epilogue;
    if (with)
      epilogue = {.activation = syncnorm::activation::leaky_relu(0.25),
                  .residual = view(residual),
                  .mask = syncnorm::mask_of(mask.data(), samples, spatial)};
    auto const run = [&]<class E>(E exec) {
      std::vector<float> to_dy(x.size()), to_x(x.size());
      std::vector<float> const a(static_cast<std::size_t>(channels), 0.5F);
      syncnorm::batch_norm<float, syncnorm::self_communicator, E> layer{{}, channels, {}, exec};
      layer.forward(view(x), view(to_x), epilogue);
      layer.double_backward({.dx = view(u), .gamma_gradient = a}, view(x), view(dy), view(to_dy), view(to_x), epilogue);
      to_dy.insert(to_dy.end(), to_x.begin(), to_x.end());
      to_dy.insert(to_dy.end(), layer.gamma_grad().begin(), layer.gamma_grad().end());
      return to_dy;
    };
    CHECK(run(syncnorm::host::serial_executor{}) == run(two_threads{}));
  }
}

TEST_CASE_TEMPLATE("double backward of fewer bits is that of the same elements in doubles, rounded", T, float,
                   syncnorm::bfloat16 AND_UNSANITIZED(syncnorm::float16)) {
  constexpr std::int64_t channels = 2, spatial = 3;
  test::second_order_case const problem{{2, 3}};
  // What a T holds of a value, so that both have the same elements.
  auto const narrow = [](std::vector<double> values) {
    for (auto& value : values) value = syncnorm::as_double(syncnorm::from_double<T>(value));
    return values;
  };
  auto const x = narrow(problem.x), dy = narrow(problem.dy), u = narrow(problem.u), v = narrow(problem.v),
             residual = narrow(problem.residual);
  std::vector<unsigned char> const mask{1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0};
  for (bool const with : {false, true})
    for (std::int64_t const batches : {1, 2})
      syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
        std::int64_t const first = comm.rank() * 2, samples = 2 + comm.rank();
        auto const run = [&]<class E>(E) {
          using syncnorm::tensor_view;
          auto const convert = [](std::vector<double> const& values) {
            std::vector<E> converted;
            for (double const value : values) converted.push_back(syncnorm::from_double<E>(value));
            return converted;
          };
          auto own_x = convert(x), own_dy = convert(dy), own_u = convert(u), own_v = convert(v),
               own_residual = convert(residual), y = own_x, to_dy = own_x, to_x = own_x;
          auto const cut = [&](std::vector<E>& values) {
            std::vector<tensor_view<E>> parts;
            auto const all = syncnorm::nchw(values.data(), 5, channels, spatial).sample_range(first, samples);
            for (std::int64_t k = 0; k < batches; ++k)
              parts.push_back(all.sample_range(k, k + 1 == batches ? samples - k : 1));
            return parts;
          };
          auto const read = [&](std::vector<E>& values) {
            auto const parts = cut(values);
            return std::vector<tensor_view<E const>>(parts.begin(), parts.end());
          };
          std::vector<syncnorm::batch_norm_epilogue<E>> epilogues(static_cast<std::size_t>(batches));
          for (std::int64_t k = 0; with && k < batches; ++k) {
            auto const part = read(own_residual)[static_cast<std::size_t>(k)];
            epilogues[static_cast<std::size_t>(k)] = {
                .activation = syncnorm::activation::leaky_relu(0.25),
                .residual = part,
                .mask = syncnorm::mask_of(mask.data() + (first + k) * spatial, part.samples, spatial)};
          }
          syncnorm::batch_norm<E, thread_communicator> layer{comm, channels};
          std::ranges::copy(problem.gamma, layer.gamma().begin());
          std::ranges::copy(problem.beta, layer.beta().begin());
          auto const xs = read(own_x), us = read(own_u), vs = read(own_v);
          layer.forward(xs, cut(y), epilogues);
          syncnorm::batch_norm_second_order_batches<E, syncnorm::accumulate_t<E>> second{.dx = us};
          if (with) second.dresidual = vs;
          layer.double_backward(second, xs, read(own_dy), cut(to_dy), cut(to_x), epilogues);
          std::vector<double> all(layer.gamma_grad().begin(), layer.gamma_grad().end());
          for (auto const* of : {&to_dy, &to_x})
            for (E const value : *of) all.push_back(syncnorm::as_double(value));
          return all;
        };
        auto const got = run(T{}), expected = run(double{});
        // Sums and coefficients in float, and of what is written as a T half a unit in its last place.
        double const unit = std::is_same_v<T, float> ? 0 : std::is_same_v<T, syncnorm::float16> ? 0x1p-11 : 0x1p-8;
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(i);
          CHECK(std::abs(got[i] - expected[i]) <= 2e-5 + (i < channels ? 0 : unit * std::abs(expected[i])));
        }
      });
}

TEST_CASE("double backward by constant statistics, and of this rank alone") {
  auto const make = [](std::uint64_t stream) {
    std::vector<double> values(12);
    for (std::size_t i = 0; i < 12; ++i) values[i] = test::noise(stream, i);
    return values;
  };
  auto x = make(1), dy = make(2), u = make(3), dx = make(4), to_dy = make(5), to_x = make(6);
  std::vector<double> const a{0.5, -1}, b{2, 3};
  auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 3); };
  for (bool const tracks : {true, false}) {
    syncnorm::batch_norm<double> layer{{}, 2, {.norm = {.eps = 0.1}, .track_running_stats = tracks}};
    layer.eval();
    layer.gamma()[0] = 2, layer.gamma()[1] = -1.5;
    if (tracks) layer.running_mean()[1] = 0.3, layer.running_var()[1] = 2;
    auto const loss = [&] {
      layer.zero_grad();
      layer.forward(view(x), view(dx));
      layer.backward(view(x), view(dy), view(dx));
      double sum = 0;
      for (std::size_t i = 0; i < 12; ++i) sum += u[i] * dx[i];
      for (std::size_t c = 0; c < 2; ++c) sum += a[c] * layer.gamma_grad()[c] + b[c] * layer.beta_grad()[c];
      return sum;
    };
    loss();
    layer.zero_grad();
    layer.double_backward({view(u), a, b}, view(x), view(dy), view(to_dy), view(to_x));
    std::vector<double> const to_gamma(layer.gamma_grad().begin(), layer.gamma_grad().end());
    auto const slope = [&](double& value) {
      double const kept = value, h = 1e-4;
      value = kept + h;
      double const up = loss();
      value = kept - h;
      double const down = loss();
      value = kept;
      return (up - down) / (2 * h);
    };
    for (std::size_t i = 0; i < 12; ++i) {
      CHECK(std::abs(to_dy[i] - slope(dy[i])) < 1e-6);
      CHECK(std::abs(to_x[i] - slope(x[i])) < 1e-6);
    }
    for (std::size_t c = 0; c < 2; ++c) CHECK(std::abs(to_gamma[c] - slope(layer.gamma()[c])) < 1e-6);
  }
}

TEST_CASE("what is wrong with a double backward pass on one rank is an error on every rank") {
  syncnorm::batch_norm<float> negative{{}, -1};
  CHECK(test_support::message_of<syncnorm::invalid_argument_error>([&] {
          negative.double_backward({}, std::span<syncnorm::tensor_view<float const> const>{}, {}, {}, {});
        }).find("the number of channels is negative: -1") != std::string::npos);
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      test::layer_data<float, thread_communicator> data{comm, 130, policy};
      data.step();
      auto const before = data.state();
      std::vector<float> to_x(data.inputs.size());
      auto const out = syncnorm::nchw(to_x.data(), data.samples, data.channels, data.spatial);
      for (bool const good : {false, true}) {
        syncnorm::batch_norm_second_order<float, float> second{.dx = data.dx()};
        if (comm.rank() == 1 && !good) second.dx.samples = 1;
        std::string text;
        try {
          data.layer.double_backward(second, data.x(), data.dy(), {}, out);
        } catch (syncnorm::invalid_argument_error const& e) {
          text = e.what();
        }
        if (good) {
          CHECK(text.empty());
          continue;
        }
        CHECK_MESSAGE(text.find("rank 1: the gradient with respect to dx is [1, ") != std::string::npos, text);
        CHECK(data.state() == before);
      }
      // The gradient of a residual that is not there.
      auto const after = data.state();
      using syncnorm::invalid_argument_error;
      auto text = test_support::message_of<invalid_argument_error>([&] {
        syncnorm::batch_norm_second_order<float, float> const second{
            .dx = data.dx(), .dresidual = comm.rank() == 1 ? data.dx() : syncnorm::tensor_view<float const>{}};
        data.layer.double_backward(second, data.x(), data.dy(), {}, out);
      });
      CHECK_MESSAGE(text.find("rank 1: there is a gradient with respect to dresidual, but no residual") !=
                        std::string::npos,
                    text);
      CHECK(data.state() == after);
      // An activation that is not of straight lines.
      text = test_support::message_of<invalid_argument_error>([&] {
        auto const activation = comm.rank() == 1 ? syncnorm::activation::elu() : syncnorm::activation::relu();
        data.layer.double_backward({.dx = data.dx()}, data.x(), data.dy(), {}, out, {.activation = activation});
      });
      CHECK_MESSAGE(text.find("rank 1: the activation is exponential, which double backward does not take") !=
                        std::string::npos,
                    text);
      CHECK(data.state() == after);
      // Memory in common.
      std::vector<float> dy(data.inputs.begin(), data.inputs.end());
      auto const of = [&](std::vector<float>& values) {
        return syncnorm::nchw(values.data(), data.samples, data.channels, data.spatial);
      };
      std::vector<float> more(dy.size());
      std::vector<float> residual(dy.size());
      auto const refused = [&](syncnorm::tensor_view<float> to_dy, syncnorm::tensor_view<float> to_other) {
        try {
          bool const bad = comm.rank() == 1;
          data.layer.double_backward({.dx = data.dx()}, data.x(), of(dy), bad ? to_dy : of(more), bad ? to_other : out,
                                     {.residual = of(residual)});
        } catch (syncnorm::invalid_argument_error const& e) {
          return std::string{e.what()};
        }
        return std::string{};
      };
      auto const check_overlap = [&](syncnorm::tensor_view<float> to_dy, syncnorm::tensor_view<float> to_other,
                                     std::string const& what) {
        text = refused(to_dy, to_other);
        CHECK_MESSAGE(text.find("rank 1: " + what + " overlap in memory") != std::string::npos, text);
      };
      check_overlap(of(more), of(dy), "the gradient to x and dy");
      check_overlap(of(more), of(residual), "the gradient to x and the residual");
      check_overlap(out, out, "the gradient to dy and the gradient to x");
    });
}
