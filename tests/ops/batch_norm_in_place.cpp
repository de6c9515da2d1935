#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/epilogue_cases.hpp>
#include <support/sanitized.hpp>

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
        syncnorm::batch_norm_epilogue<T> epilogue{.activation = {choice.slope}};
        if (choice.residual) epilogue.residual = residual->view;
        if (!data.mask.empty())
          epilogue.mask = syncnorm::mask_of(data.mask.data() + first * g.spatial, samples, g.spatial);
        if (choice.zeroes) epilogue.masked = syncnorm::masked_outputs::zero;

        syncnorm::batch_norm<T, thread_communicator> layer{comm, g.channels, {.norm = {.eps = data.eps}}};
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
          if (choice.slope <= 0 || c % 4 == 1 || c % 4 == 2) kept.push_back(c);
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

TEST_CASE("x is back after a pass in place, and stays there") {
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<float> x(4 * 3 * 10);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(100 + test::noise(static_cast<std::uint64_t>(comm.rank()), i));
    auto over = x, first = x, second = x;
    auto const dy = x;
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 4, 3, 10); };
    syncnorm::batch_norm<float, thread_communicator> layer{comm, 3};
    layer.forward_in_place(view(over));
    CHECK(layer.kept().channels().empty());
    CHECK(layer.kept().bytes() == 0);
    layer.backward_in_place(view(over), view(dy), view(first));
    float worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(over[i] - x[i]));
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
