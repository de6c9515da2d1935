#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/detail/shared_in_place.hpp>

#include <ops/epilogue_cases.hpp>
#include <support/failing_executor.hpp>
#include <support/sanitized.hpp>
#include <support/throws.hpp>
#include <support/worse_of.hpp>

using syncnorm::run_ranks;
using syncnorm::thread_communicator;

namespace {

/// Channels in turn: one that is recovered, one of a small gamma, one of a large beta, and again one that is recovered.
template <class T>
void choose_parameters(test::epilogue_case<T>& data) {
  for (std::size_t c = 0; c < data.gamma.size(); ++c) {
    data.gamma[c] = c % 4 == 1 ? 0x1p-10 : c % 4 == 3 ? -1.5 : 0.75;
    data.beta[c] = c % 4 == 2 ? 50 : 0.5;
  }
  data.oracle.gamma = data.wide(data.gamma);
  data.oracle.beta = data.wide(data.beta);
  data.oracle.forward();
  data.oracle.for_each_near_kink(1e-5L, [&](std::size_t i) { data.dy[i] = syncnorm::from_double<T>(0); });
}

} // namespace

TEST_CASE_TEMPLATE("a pass in place recovers x, or keeps it", T, float, syncnorm::bfloat16 AND_UNSANITIZED(double)) {
  using P = syncnorm::accumulate_t<T>;
  for (auto const& choice : test::epilogue_choices)
    for (auto const order : test::layouts) {
      std::int64_t const spatial = order == test::layout::nc ? 1 : 19;
      test::epilogue_case<T> data{{2, 22, 6, spatial, test::partition::uneven, order}, choice};
      choose_parameters(data);
      CAPTURE(choice.name());
      run_ranks(2, [&](thread_communicator const& comm) {
        auto const& g = data.cell;
        int const rank = comm.rank();
        auto const samples = g.samples_of(rank), first = g.first_sample_of(rank);
        auto const make = [&](std::vector<T> const& values) {
          auto made = std::make_unique<test::owned_tensor<T>>(order, samples, g.channels, g.spatial);
          for (std::int64_t n = 0; n < samples && !values.empty(); ++n)
            for (std::int64_t c = 0; c < g.channels; ++c)
              for (std::int64_t s = 0; s < g.spatial; ++s)
                made->view(n, c, s) = values[static_cast<std::size_t>(((first + n) * g.channels + c) * g.spatial + s)];
          return made;
        };
        auto const x = make(data.x), over = make(data.x), y = make({}), dy = make(data.dy),
                   residual = make(data.residual);
        auto const dresidual = make({});
        syncnorm::batch_norm_epilogue<T> epilogue{.activation = choice.activation()};
        if (choice.residual) epilogue.residual = residual->view;
        if (!data.mask.empty())
          epilogue.mask = syncnorm::mask_of(data.mask.data() + first * g.spatial, samples, g.spatial);
        if (choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;

        syncnorm::batch_norm<T, thread_communicator> layer{comm, g.channels, {.norm = data.norm()}};
        for (std::size_t c = 0; c < data.gamma.size(); ++c) {
          layer.gamma()[c] = static_cast<P>(data.gamma[c]);
          layer.beta()[c] = static_cast<P>(data.beta[c]);
        }
        layer.forward(x->view, y->view, epilogue);
        layer.forward_in_place(over->view, epilogue);
        bool same = true;
        auto const each = [&](auto const& f) {
          for (std::int64_t n = 0; n < samples; ++n)
            for (std::int64_t c = 0; c < g.channels; ++c)
              for (std::int64_t s = 0; s < g.spatial; ++s) f(n, c, s);
        };
        each([&](auto n, auto c, auto s) { same &= y->view(n, c, s) == over->view(n, c, s); });
        CHECK(same);
        // Without an inverse of the activation all channels are kept, else those of which gamma and beta leave too little.
        std::vector<std::int64_t> kept;
        for (std::int64_t c = 0; c < g.channels; ++c)
          if (choice.slope <= 0 || choice.exponential || c % 4 == 1 || c % 4 == 2) kept.push_back(c);
        CHECK(std::ranges::equal(layer.kept().channels(), kept));
        CHECK(layer.kept().bytes() == kept.size() * static_cast<std::size_t>(samples * g.spatial) * sizeof(T));

        // dx over y, in which x is recovered before.
        layer.backward_in_place(over->view, dy->view, over->view, epilogue,
                                choice.residual ? dresidual->view : syncnorm::tensor_view<T>{});
        auto const gradients = data.oracle.backward(data.wide(data.dy), first, first + samples);
        test::comparison dx{1}, dr{1};
        each([&](auto n, auto c, auto s) {
          auto const i = static_cast<std::size_t>(((first + n) * g.channels + c) * g.spatial + s);
          dx.add(syncnorm::as_double(over->view(n, c, s)), gradients.dx[i]);
          if (choice.residual) dr.add(syncnorm::as_double(dresidual->view(n, c, s)), gradients.dresidual[i]);
        });
        // Recovered values are off by their rounding over gamma; they are below 4, and of them and dy the mean product is below
        // 1, which dx has beside dy.
        double const recovered = test::rounding<T> * (4 + syncnorm::recoverable_ratio<T>);
        CHECK_MESSAGE(dx.within(test::tolerance<T> + recovered), dx.text());
        if (choice.residual) CHECK_MESSAGE(dr.within(test::tolerance<T>), dr.text());
      });
    }
}

TEST_CASE_TEMPLATE("micro-batches in place are their concatenation, whatever is kept of each", T, float,
                   syncnorm::bfloat16 AND_UNSANITIZED(double)) {
  using P = syncnorm::accumulate_t<T>;
  using tensor = std::unique_ptr<test::owned_tensor<T>>;
  // Samples of each micro-batch of each rank.
  std::vector<std::vector<std::int64_t>> const shares{{8}, {3, 0, 6}, {1, 9}};
  for (auto const& choice : test::epilogue_choices)
    for (auto const order : test::layouts) {
      if (test::sanitized && order != test::layout::nchw && order != test::layout::nhwc) continue;
      std::int64_t const spatial = order == test::layout::nc ? 1 : 11;
      test::epilogue_case<T> data{{3, 6, 8, spatial, test::partition::uneven, order}, choice};
      choose_parameters(data);
      CAPTURE(choice.name());
      run_ranks(3, [&](thread_communicator const& comm) {
        auto const& g = data.cell;
        auto const& share = shares[static_cast<std::size_t>(comm.rank())];
        auto const first = g.first_sample_of(comm.rank()), last = first + g.samples_of(comm.rank());
        auto const each = [&](auto const& f) { // f(k, view indices, index into the whole batch)
          auto sample = first;
          for (std::size_t k = 0; k < share.size(); ++k)
            for (std::int64_t n = 0; n < share[k]; ++n, ++sample)
              for (std::int64_t c = 0; c < g.channels; ++c)
                for (std::int64_t s = 0; s < g.spatial; ++s)
                  f(k, n, c, s, static_cast<std::size_t>((sample * g.channels + c) * g.spatial + s));
        };
        auto const make = [&](std::vector<T> const& values) {
          std::vector<tensor> made;
          for (auto const n : share)
            made.push_back(std::make_unique<test::owned_tensor<T>>(order, n, g.channels, g.spatial));
          if (!values.empty())
            each([&](auto k, auto n, auto c, auto s, auto i) { made[k]->view(n, c, s) = values[i]; });
          return made;
        };
        auto const views = [](std::vector<tensor> const& of) {
          std::vector<syncnorm::tensor_view<T>> all;
          for (auto const& one : of) all.push_back(one->view);
          return all;
        };
        auto const over = make(data.x), x = make(data.x), y = make({}), dy = make(data.dy),
                   residual = make(data.residual), dresidual = make({});
        auto const read_x = views(x), read_dy = views(dy);
        std::vector<syncnorm::tensor_view<T const>> const xs(read_x.begin(), read_x.end()),
            dys(read_dy.begin(), read_dy.end());
        std::vector<syncnorm::batch_norm_epilogue<T>> epilogues;
        auto sample = first;
        for (std::size_t k = 0; k < share.size(); ++k) {
          auto& epilogue = epilogues.emplace_back(syncnorm::batch_norm_epilogue<T>{.activation = choice.activation()});
          if (choice.residual) epilogue.residual = residual[k]->view;
          if (!data.mask.empty())
            epilogue.mask = syncnorm::mask_of(data.mask.data() + sample * g.spatial, share[k], g.spatial);
          if (choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;
          sample += share[k];
        }

        syncnorm::batch_norm<T, thread_communicator> layer{comm, g.channels, {.norm = data.norm()}};
        auto apart = layer;
        for (auto* const of : {&layer, &apart})
          for (std::size_t c = 0; c < data.gamma.size(); ++c) {
            of->gamma()[c] = static_cast<P>(data.gamma[c]);
            of->beta()[c] = static_cast<P>(data.beta[c]);
          }
        apart.forward(xs, views(y), epilogues);
        layer.forward_in_place(views(over), epilogues);
        bool same = true;
        each([&](auto k, auto n, auto c, auto s, auto) { same &= y[k]->view(n, c, s) == over[k]->view(n, c, s); });
        CHECK(same);
        CHECK(std::ranges::equal(layer.running_mean(), apart.running_mean()));
        CHECK(std::ranges::equal(layer.running_var(), apart.running_var()));
        CHECK(layer.num_batches_tracked() == (data.oracle.count > 0 ? 1 : 0));
        std::size_t const kept = choice.slope <= 0 || choice.exponential ? 6 : 3; // channels 1, 2 and 5
        for (std::size_t k = 0; k < share.size(); ++k)
          CHECK(layer.kept(k).bytes() == kept * static_cast<std::size_t>(share[k] * g.spatial) * sizeof(T));

        layer.backward_in_place(views(over), dys, views(over), epilogues,
                                choice.residual ? views(dresidual) : std::vector<syncnorm::tensor_view<T>>{});
        auto const gradients = data.oracle.backward(data.wide(data.dy), first, last);
        test::comparison dx{1}, dr{1}, gamma{static_cast<long double>(g.samples() * g.spatial)}, beta = gamma;
        each([&](auto k, auto n, auto c, auto s, auto i) {
          dx.add(syncnorm::as_double(over[k]->view(n, c, s)), gradients.dx[i]);
          if (choice.residual) dr.add(syncnorm::as_double(dresidual[k]->view(n, c, s)), gradients.dresidual[i]);
        });
        for (std::size_t c = 0; c < data.gamma.size(); ++c) {
          gamma.add(static_cast<double>(layer.gamma_grad()[c]), gradients.gamma[c]);
          beta.add(static_cast<double>(layer.beta_grad()[c]), gradients.beta[c]);
        }
        double const recovered = test::rounding<T> * (4 + syncnorm::recoverable_ratio<T>); // as above
        CHECK_MESSAGE(dx.within(test::tolerance<T> + recovered), dx.text());
        if (choice.residual) CHECK_MESSAGE(dr.within(test::tolerance<T>), dr.text());
        CHECK_MESSAGE(gamma.within(test::tolerance<T, double> + recovered), gamma.text());
        CHECK_MESSAGE(beta.within(test::tolerance<T, double>), beta.text());
      });
    }
}

TEST_CASE("micro-batches in place may differ in their activations, and be of any mode") {
  // Of each, what is kept follows from its own activation.
  std::array const slopes{0.25, 0.0, 1.0};
  enum class mode { training, evaluation, by_itself };
  for (auto const how : {mode::training, mode::evaluation, mode::by_itself})
    run_ranks(2, [&](thread_communicator const& comm) {
      std::vector<double> x(3 * 2 * 4 * 5), dy(x.size()), y(x.size()), dx(x.size()), over, over_dx(x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = 3 + test::noise(static_cast<std::uint64_t>(comm.rank()), i);
        dy[i] = test::noise(static_cast<std::uint64_t>(2 + comm.rank()), i);
      }
      over = x;
      auto const parts = [](auto& values) {
        using view = syncnorm::tensor_view<std::remove_reference_t<decltype(values[0])>>;
        std::vector<view> all;
        for (std::int64_t k = 0; k < 3; ++k) all.push_back(syncnorm::nchw(values.data() + k * 40, 2, 4, 5));
        return all;
      };
      std::vector<syncnorm::batch_norm_epilogue<double>> epilogues;
      for (double const slope : slopes) epilogues.push_back({.activation = {slope}});
      syncnorm::batch_norm<double, thread_communicator> layer{comm, 4, {.track_running_stats = how != mode::by_itself}};
      if (how != mode::training) layer.eval();
      layer.gamma()[2] = 0;
      auto twin = layer;
      std::vector<double> const &cx = x, &cdy = dy;
      twin.forward(parts(cx), parts(y), epilogues);
      twin.backward(parts(cx), parts(cdy), parts(dx), epilogues);
      layer.forward_in_place(parts(over), epilogues);
      CHECK(over == y);
      CHECK(layer.kept(0).channels().size() == 1);
      CHECK(layer.kept(1).channels().size() == 4);
      CHECK(layer.kept(2).channels().size() == 1);
      CHECK_THROWS_AS((void)layer.kept(3), syncnorm::invalid_argument_error);
      for (int i = 0; i < 2; ++i) { // the second time from x, which is back
        layer.backward_in_place(parts(over), parts(cdy), parts(over_dx), epilogues);
        double worst = 0;
        for (std::size_t k = 0; k < x.size(); ++k) worst = test::worse_of(worst, std::abs(over_dx[k] - dx[k]));
        CHECK(worst <= 1e-12);
      }
      for (std::size_t c = 0; c < 4; ++c) CHECK(std::abs(layer.gamma_grad()[c] - 2 * twin.gamma_grad()[c]) <= 1e-12);
      // Without gradients of x, after fewer micro-batches than before.
      std::ranges::copy(x, over.begin());
      auto const fewer = parts(over);
      auto const dys = parts(cdy);
      layer.forward_in_place(std::span{fewer}.first(2));
      layer.backward_in_place(std::span{fewer}.first(2), std::span{dys}.first(2), {});
    });
}

TEST_CASE("micro-batches in place: what is wrong on one rank is an error on every rank, and x stays") {
  run_ranks(3, [](thread_communicator const& comm) {
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 2};
    std::vector<float> x(3 * 2 * 2 * 4), dy(x.size(), 1), dx(x.size(), -5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(test::noise(1, i));
    auto const given = x;
    auto const parts = [](auto& values) {
      using view = syncnorm::tensor_view<std::remove_reference_t<decltype(values[0])>>;
      return std::vector<view>{syncnorm::nchw(values.data(), 2, 2, 4), syncnorm::nchw(values.data() + 16, 1, 2, 4)};
    };
    std::vector<float> const &cx = x, &cdy = dy;
    bool const here = comm.rank() == 1;
    auto const thrown = [&](std::string const& what, auto const& f) {
      test::check_throws<syncnorm::invalid_argument_error>(f, {"rank 1: " + what});
      CHECK(layer.num_batches_tracked() == 0);
      CHECK(std::ranges::equal(layer.running_mean(), std::array{0.0F, 0.0F}));
    };
    auto const forward = [&](std::string const& what, std::vector<syncnorm::tensor_view<float>> const& over,
                             std::vector<syncnorm::batch_norm_epilogue<float>> const& with = {}) {
      thrown(what, [&] { layer.forward_in_place(over, with); });
      CHECK(x == given);
    };
    std::vector<syncnorm::batch_norm_epilogue<float>> const one(1), two(2);
    forward("there are 1 epilogues, expected 2 as micro-batches of x", parts(x), here ? one : two);
    auto over = parts(x);
    if (here) over[1] = over[0].sample_range(1, 1);
    forward("x[0] and x[1] are in the same memory, which a pass in place writes to", over);
    over = parts(x);
    if (here) over[1].data -= 4; // a part of one channel in common
    forward("x[0] and x[1] are in the same memory", over);
    auto with = two;
    if (here) with[0].residual = syncnorm::nchw(cx.data() + 16, 2, 2, 4);
    forward("the residual[0] is in the memory of x[1], which a pass in place writes to", parts(x), with);
    if (here) with[0].residual = syncnorm::nchw(cx.data(), 2, 2, 4);
    forward("the residual[0] is in the memory of x[0], which a pass in place writes to", parts(x), with);
    if (here) with[0].residual = syncnorm::nchw(cdy.data(), 2, 2, 3);
    forward("the residual[0] is [2, 2, 3], expected [2, 2, 4] as x", parts(x), with);
    over = parts(x);
    if (here) over[1].data = nullptr;
    forward("x[1] is null", over);
    over = parts(x);
    if (here) over[0].stride_n = std::numeric_limits<std::int64_t>::max() / 2;
    forward("x[0] has the strides [4611686018427387903, 4, 1], which no memory has room for", over);

    layer.forward_in_place(parts(x), two);
    auto const y = x;
    auto const backward = [&](std::string const& what, auto const& f) {
      test::check_throws<syncnorm::invalid_argument_error>(f, {"rank 1: " + what});
      CHECK(dx == std::vector<float>(x.size(), -5));
      CHECK(std::ranges::equal(layer.gamma_grad(), std::array{0.0F, 0.0F}));
    };
    auto const some = [&](auto const& all, std::size_t count) { return std::span{all}.first(here ? count : 2); };
    auto const ys = parts(x), dxs = parts(dx);
    auto const dys = parts(cdy);
    backward("there are 1 micro-batches of y, expected 2 as of the forward pass in place",
             [&] { layer.backward_in_place(some(ys, 1), some(dys, 1), some(dxs, 1)); });
    CHECK((x == y || !here)); // here, nothing was recovered
    backward("there are 1 epilogues, expected 2 as micro-batches of y",
             [&] { layer.backward_in_place(ys, dys, dxs, some(two, 1)); });
    auto bad = ys;
    if (here) bad[1].spatial = 3;
    backward("micro-batch 1: y is [1, 2, 3], expected [1, 2, 4] as x",
             [&] { layer.backward_in_place(bad, dys, dxs, two); });
    backward("there are 1 micro-batches of dy", [&] { layer.backward_in_place(ys, some(dys, 1), dxs, two); });
    layer.backward_in_place(ys, dys, dxs, two);
    float worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = test::worse_of(worst, std::abs(x[i] - given[i]));
    CHECK(worst <= 2e-6F); // x is back, once
    CHECK(dx[0] != -5);

    layer.eval();
    if (here)
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] {
            layer.forward_in_place(std::vector{ys[0], ys[0]});
          },
          {"batch_norm inference: x[0] and x[1] are in the same memory"});
  });
}

TEST_CASE("x is recovered by the gamma and beta of the forward pass, whatever they are since") {
  std::vector<float> x(60), y(x), dy(x), dx(x), over;
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(i * i % 17), dy[i] = static_cast<float>(i % 7) - 3;
  over = x;
  auto const view = [](std::vector<float>& of) { return syncnorm::nchw(of.data(), 4, 3, 5); };
  syncnorm::batch_norm<float> apart{{}, 3}, in_place{{}, 3};
  apart.forward(view(x), view(y));
  in_place.forward_in_place(view(over));
  for (auto* const layer : {&apart, &in_place}) layer->gamma()[1] = 3, layer->beta()[2] = -2;
  apart.backward(view(x), view(dy), view(dx));
  in_place.backward_in_place(view(over), view(dy), view(y));
  for (std::size_t i = 0; i < x.size(); ++i) {
    CHECK(std::abs(over[i] - x[i]) <= 1e-5 * 17);
    CHECK(std::abs(y[i] - dx[i]) <= 1e-5 * 3);
  }
}

TEST_CASE("x is back after a pass in place, and stays there") {
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<float> x(4 * 3 * 10);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(100 + test::noise(static_cast<std::uint64_t>(comm.rank()), i));
    auto over = x, first = x, second = x;
    auto const dy = x;
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 4, 3, 10); };
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 3};
    CHECK_THROWS_AS((void)layer.kept(), syncnorm::invalid_argument_error);
    layer.forward_in_place(view(over));
    CHECK(layer.kept().channels().empty());
    CHECK(layer.kept().bytes() == 0);
    layer.backward_in_place(view(over), view(dy), view(first));
    float worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = test::worse_of(worst, std::abs(over[i] - x[i]));
    CHECK(worst <= 100 * 0x1p-23F); // a bit of x itself
    layer.backward_in_place(view(over), view(dy), view(second));
    CHECK(second == first);

    std::string what;
    layer.forward_in_place(view(over));
    try {
      layer.backward_in_place(comm.rank() == 0 ? syncnorm::nchw(over.data(), 4, 3, 9) : view(over), view(dy),
                              view(first));
    } catch (syncnorm::invalid_argument_error const& error) {
      what = error.what();
    }
    CHECK_MESSAGE(what.find("rank 0: y is [4, 3, 9], expected [4, 3, 10]") != std::string::npos, what);
  });
}

TEST_CASE("nothing is kept of an x that no memory has room for, or whose elements overlap, but said what is wrong") {
  run_ranks(2, [](thread_communicator const& comm) {
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 2};
    layer.gamma()[0] = 0; // a channel that is kept
    std::vector<float> values(8, 1);
    auto const check = [&](std::int64_t samples, std::int64_t stride, char const* part) {
      auto x = syncnorm::nchw(values.data(), 2, 2, 2);
      if (comm.rank() == 1) x.samples = samples, x.stride_n = stride;
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] { layer.forward_in_place(x); },
          {"rank 1: ", " has the strides [" + std::to_string(stride) + ", 2, 1]", part});
    };
    check(2, std::int64_t{1} << 51, "no memory has room");
    check(2, std::numeric_limits<std::int64_t>::max(), "no memory has room");
    check(std::int64_t{1} << 40, 0, "its elements overlap");
  });
}

TEST_CASE("a backward pass in place follows its forward pass, and what recovering x throws is an error on every rank") {
  run_ranks(2, [](thread_communicator const& comm) {
    int uses = 1;
    syncnorm::batch_norm<float, thread_communicator, test::failing_executor> layer{comm, 2, {}, {&uses, 1}};
    std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, dy(8, 1), dx(8), other(8, 3), out(8);
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 2); };
    auto const backward = [&] { layer.backward_in_place(view(x), view(std::as_const(dy)), view(dx)); };
    test::check_throws<syncnorm::invalid_argument_error>(backward,
                                                         {"rank 1: the latest forward pass was not in place"});
    layer.forward_in_place(view(x));
    layer.eval();
    layer.forward(view(std::as_const(other)), view(out));
    layer.train();
    auto const y = x;
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"the latest forward pass was not in place"});
    CHECK(x == y);

    layer.forward_in_place(view(x));
    uses = comm.rank() == 1 ? 0 : 1;
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"rank 1: no threads"});
  });
}

TEST_CASE("what is x in part, where recovering it failed midway, is not taken for y by the next backward pass") {
  run_ranks(2, [](thread_communicator const& comm) {
    int uses = 1;
    syncnorm::batch_norm<float, thread_communicator, test::failing_executor> layer{comm, 3, {}, {&uses, 1}};
    layer.gamma()[1] = 0; // kept, so that the channels before and after it are recovered one after the other
    std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31}, dy(12, 1), dx(12);
    auto const from = x;
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 3, 2); };
    auto const backward = [&] { layer.backward_in_place(view(x), view(std::as_const(dy)), view(dx)); };
    layer.forward_in_place(view(x));
    uses = comm.rank() == 1 ? -1 : 1;
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"rank 1: no threads"});
    auto const in_part = x;
    test::check_throws<syncnorm::invalid_argument_error>(backward,
                                                         {"rank 1: a backward pass failed while it recovered x"});
    if (comm.rank() == 1) CHECK(x == in_part);
    x = from;
    layer.forward_in_place(view(x));
    backward();
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(std::abs(x[i] - from[i]) <= 1e-4F);
  });
}

TEST_CASE("a backward pass in place whose epilogue is wrong leaves y to the one that is right") {
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<float> x(2 * 3 * 4), dy(x.size()), dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(test::noise(static_cast<std::uint64_t>(comm.rank()), i));
      dy[i] = static_cast<float>(i % 5);
    }
    auto const from = x;
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 3, 4); };
    syncnorm::batch_norm_epilogue<float> const right{syncnorm::activation::leaky_relu(0.25)};
    std::vector<std::uint8_t> const mask(8);
    std::vector<syncnorm::batch_norm_epilogue<float>> const wrong{
        {syncnorm::activation{std::numeric_limits<double>::quiet_NaN()}},
        {right.activation, {}, syncnorm::mask_of(mask.data(), 2, 3)}};
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 3};
    layer.forward_in_place(view(x), right);
    for (auto const& each : wrong)
      CHECK_THROWS_AS(layer.backward_in_place(view(x), view(dy), view(dx), comm.rank() == 1 ? each : right),
                      syncnorm::invalid_argument_error);
    layer.backward_in_place(view(x), view(dy), view(dx), right);
    float worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = test::worse_of(worst, std::abs(x[i] - from[i]));
    CHECK(worst <= 1e-6F);
  });
}

TEST_CASE("views overlap where they have an element in common, backwards, too") {
  std::vector<double> memory(64);
  using view = syncnorm::tensor_view<double const>;
  using syncnorm::detail::overlap, syncnorm::detail::overlaps_itself;
  double const* const x = memory.data();
  view const rows{x, 2, 3, 4, 12, 4, 1}, after{x + 24, 2, 3, 4, 12, 4, 1};
  view const backwards{x + 23, 2, 3, 4, -12, -4, -1}, after_backwards{x + 47, 2, 3, 4, -12, -4, -1};
  CHECK(overlap<double>(rows, rows));
  CHECK(overlap<double>(backwards, backwards));
  CHECK_FALSE(overlap<double>(rows, after));
  CHECK_FALSE(overlap<double>(backwards, after_backwards));
  CHECK_FALSE(overlap<double>(rows, after_backwards));
  CHECK_FALSE(overlap<double>(after, backwards));
  CHECK(overlap<double>(rows, backwards));
  // Even and odd positions, either way.
  CHECK_FALSE(overlap<double>({x, 2, 3, 2, 12, 4, 2}, {x + 1, 2, 3, 2, 12, 4, 2}));
  CHECK_FALSE(overlap<double>({x + 22, 2, 3, 2, -12, -4, -2}, {x + 23, 2, 3, 2, -12, -4, -2}));
  CHECK(overlap<double>({x + 22, 2, 3, 2, -12, -4, -2}, {x + 20, 2, 3, 2, -12, -4, -2}));

  // Each place looked at, of equal strides and of others.
  auto const places = [](view const& of) {
    std::set<double const*> all;
    for (std::int64_t n = 0; n < of.samples; ++n)
      for (std::int64_t c = 0; c < of.channels; ++c)
        for (std::int64_t s = 0; s < of.spatial; ++s) all.insert(&of(n, c, s));
    return all;
  };
  std::mt19937 random{5};
  auto const up_to = [&](int most) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(most + 1)); };
  int overlapping = 0;
  for (int i = 0; i < 4000; ++i) {
    view a{x + 30, 1 + up_to(2), 1 + up_to(2), 1 + up_to(2), up_to(9) - 4, up_to(9) - 4, up_to(9) - 4}, b = a;
    b.data += up_to(12) - 6, b.samples = 1 + up_to(2), b.channels = 1 + up_to(2), b.spatial = 1 + up_to(2);
    bool const others = i % 2 == 1;
    // The stride of an extent of 1 says nothing.
    if (others || a.samples == 1 || b.samples == 1) b.stride_n = up_to(9) - 4;
    if (others || a.channels == 1 || b.channels == 1) b.stride_c = up_to(9) - 4;
    if (others || a.spatial == 1 || b.spatial == 1) b.stride_s = up_to(9) - 4;
    auto const of_a = places(a);
    CHECK(overlaps_itself(a) == (std::ssize(of_a) < a.size()));
    bool const expected = std::ranges::any_of(places(b), [&](auto const* place) { return of_a.contains(place); });
    CHECK(overlap<double>(a, b) == expected);
    overlapping += expected ? 1 : 0;
  }
  CHECK((overlapping > 1000 && overlapping < 3000));

  // Large ones: odd places beside even ones, and beside every third.
  std::vector<double> large(3 << 20);
  view const odd{large.data() + 1, 1024, 512, 1, 1024, 2, 0}, even{large.data(), 512, 1, 256, 2048, 0, 4};
  CHECK_FALSE(overlap<double>(odd, even));
  view others{large.data() + 6, 1, 1, 300, 0, 0, 4};
  CHECK_FALSE(overlap<double>(odd, others));
  others.stride_s = 3;
  CHECK(overlap<double>(odd, others));
}
