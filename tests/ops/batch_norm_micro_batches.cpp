#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>

#include <ops/micro_batches.hpp>
#include <support/message_of.hpp>
#include <support/sanitized.hpp>

using syncnorm::thread_communicator;

TEST_CASE_TEMPLATE("micro-batches by one statistic are their concatenation", T, float AND_UNSANITIZED(double)) {
  std::size_t cells = 0;
  for (auto const& shares : test::micro_batch_shares)
    for (auto const order : test::layouts)
      for (std::int64_t const channels : {1, 3, 130})
        for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce}) {
          if (test::sanitized && cells++ % 7 > 0) continue;
          syncnorm::run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
            for (auto const& failure : test::check_micro_batches<T>(comm, shares, order, channels, policy))
              FAIL_CHECK(failure);
          });
        }
}

TEST_CASE("micro-batches need neither several ranks nor the same number on each") {
  for (auto const& failure :
       test::check_micro_batches<double>(syncnorm::self_communicator{}, {{2, 3, 0, 1}}, test::layout::nchw, 5))
    FAIL_CHECK(failure);
  for (auto const& failure :
       test::check_micro_batches<double>(syncnorm::self_communicator{}, {{7}}, test::layout::nhwc, 5))
    FAIL_CHECK(failure);
}

TEST_CASE("of some micro-batches the gradient may not be wanted") {
  for (bool const activates : {false, true}) {
    std::vector<std::vector<float>> x{{1, 5, 2, 7, 3, 3}, {4, 0, 6, 2, 9, 1}},
        dy{{2, 1, 0, 3, 1, 1}, {1, 2, 5, 0, 2, 3}}, y{x}, dx{x}, alone{x};
    auto const views = [](auto& values) {
      return std::vector{syncnorm::nchw(values[0].data(), 1, 3, 2), syncnorm::nchw(values[1].data(), 1, 3, 2)};
    };
    auto const inputs = [&](auto& values) {
      auto const all = views(values);
      return std::vector<syncnorm::tensor_view<float const>>(all.begin(), all.end());
    };
    std::vector<syncnorm::batch_norm_epilogue<float>> epilogues(2);
    if (activates) epilogues[0].activation = epilogues[1].activation = syncnorm::activation::relu();
    syncnorm::batch_norm<float> layer{{}, 3}, other{{}, 3};
    for (auto* const each : {&layer, &other}) each->forward(inputs(x), views(y), epilogues);
    layer.backward(inputs(x), inputs(dy), views(dx), epilogues);
    auto some = views(alone);
    some[0] = {};
    other.backward(inputs(x), inputs(dy), some, epilogues);
    CHECK(alone[0] == x[0]);
    CHECK(alone[1] == dx[1]);
    CHECK(std::ranges::equal(other.gamma_grad(), layer.gamma_grad()));
  }
}

// As many channels as make up several blocks of the second-level cache, which a rank takes one after the other, and ranks exchange part
// after part.
TEST_CASE("micro-batches whose channels are taken in blocks are their concatenation") {
  test::micro_batch_share const one{{2, 3, 0, 1}}, two{{3, 1}, {0, 2, 1}};
  for (auto const order : {test::layout::nchw, test::layout::nhwc}) {
    auto const positions = test::sanitized ? 3000 : 12'000;
    for (auto const& failure : test::check_micro_batches<float>(syncnorm::self_communicator{}, one, order, 40,
                                                                syncnorm::exchange_policy::automatic, positions))
      FAIL_CHECK(failure);
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      for (auto const& failure :
           test::check_micro_batches<float>(comm, two, order, 40, syncnorm::exchange_policy::automatic, positions))
        FAIL_CHECK(failure);
    });
  }
}

TEST_CASE("micro-batches in evaluation, with frozen statistics, and without running statistics") {
  std::vector<double> x(2 * 3 * 4), y(x.size()), dx(x.size()), whole_y(x.size()), whole_dx(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = test::noise(1, i);
  auto const all = [](auto& values) { return syncnorm::nchw(values.data(), 4, 3, 2); };
  auto const parts = [&](auto& values) {
    using view = syncnorm::tensor_view<std::remove_reference_t<decltype(values[0])>>;
    return std::array<view, 3>{all(values).sample_range(0, 1), all(values).sample_range(1, 0),
                               all(values).sample_range(1, 3)};
  };
  std::vector<double> const& cx = x;
  for (bool const tracks : {true, false}) {
    syncnorm::batch_norm<double> layer{{}, 3, {.track_running_stats = tracks}};
    layer.eval();
    layer.forward(all(cx), all(whole_y));
    layer.backward(all(cx), all(cx), all(whole_dx));
    std::vector<double> const gradient(layer.gamma_grad().begin(), layer.gamma_grad().end());
    layer.zero_grad();
    layer.forward(parts(cx), parts(y));
    layer.backward(parts(cx), parts(cx), parts(dx));
    for (std::size_t i = 0; i < x.size(); ++i) {
      CHECK(std::abs(y[i] - whole_y[i]) < 1e-13);
      CHECK(std::abs(dx[i] - whole_dx[i]) < 1e-12);
    }
    for (std::size_t c = 0; c < 3; ++c) CHECK(std::abs(layer.gamma_grad()[c] - gradient[c]) < 1e-12);
  }
}

TEST_CASE("a rank without micro-batches takes no part in passes by constant statistics") {
  syncnorm::run_ranks(2, [](thread_communicator const& comm) {
    syncnorm::batch_norm<double, thread_communicator> layer{comm, 2};
    std::vector<double> x{1, 2, 3, 4}, y(x.size()), dx(x.size());
    auto const view = [](auto& values) { return std::array{syncnorm::nchw(values.data(), 1, 2, 2)}; };
    std::vector<double> const& in = x;
    std::size_t const batches = comm.rank() == 0 ? 1 : 0;
    auto const some = [&](auto const& views) { return std::span{views}.first(batches); };
    auto const xs = view(in);
    auto const ys = view(y), dxs = view(dx);
    layer.freeze_statistics();
    layer.forward(some(xs), some(ys));
    CHECK(layer.saved().scope == syncnorm::statistics_scope::constant);
    layer.backward(some(xs), some(xs), some(dxs));
    syncnorm::batch_norm_group group{comm};
    group.run(syncnorm::passes(layer.plan_forward(some(xs), some(ys))));
    group.run(syncnorm::passes(layer.plan_backward(some(xs), some(xs), some(dxs))));
    CHECK(layer.beta_grad()[1] == (batches == 1 ? 14 : 0));
    layer.freeze_statistics(false);
    layer.forward(some(xs), some(ys));
    CHECK(layer.saved().mean[1] == 3.5);
  });
}

TEST_CASE("what is wrong with a micro-batch of one rank is an error on every rank") {
  syncnorm::run_ranks(3, [](thread_communicator const& comm) {
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 2};
    std::vector<float> x(2 * 2 * 4, 1.0F), y(x.size());
    std::array<syncnorm::tensor_view<float const>, 2> xs{syncnorm::nchw(x.data(), 2, 2, 2),
                                                         syncnorm::nchw(x.data() + 8, 2, 2, 2)};
    std::array<syncnorm::tensor_view<float>, 2> const ys{syncnorm::nchw(y.data(), 2, 2, 2),
                                                         syncnorm::nchw(y.data() + 8, 2, 2, 2)};
    auto const good = xs[1];
    if (comm.rank() == 1) xs[1].data = nullptr;
    auto const null = test_support::message_of<syncnorm::invalid_argument_error>([&] { layer.forward(xs, ys); });
    CHECK_MESSAGE(null.find("rank 1: x[1] is null") != std::string::npos, null);
    xs[1] = good;
    auto const few = test_support::message_of<syncnorm::invalid_argument_error>(
        [&] { layer.forward(xs, std::span{ys}.first(comm.rank() == 2 ? 1 : 2)); });
    CHECK_MESSAGE(few.find("rank 2: there are 1 micro-batches of y, expected 2") != std::string::npos, few);
    CHECK(layer.num_batches_tracked() == 0);
    layer.forward(xs, ys);
    auto const dys = test_support::message_of<syncnorm::invalid_argument_error>(
        [&] { layer.backward(xs, std::span{xs}.first(comm.rank() == 0 ? 1 : 2), ys); });
    CHECK_MESSAGE(dys.find("rank 0: there are 1 micro-batches of dy") != std::string::npos, dys);
    layer.backward(xs, xs, ys);
    CHECK(layer.num_batches_tracked() == 1);
  });
}
