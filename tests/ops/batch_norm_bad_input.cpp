#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/passes.hpp>

#include <comm/broken.hpp>
#include <ops/batch_norm_steps.hpp>
#include <ops/quick_communicator.hpp>
#include <support/failing_executor.hpp>
#include <support/message_of.hpp>
#include <support/sanitized.hpp>
#include <support/throws.hpp>

using test::layer_of_floats;
using test::quick_communicator;
using test::step_inputs;

namespace {

constexpr syncnorm::host::serial_executor serial{};
constexpr int world_size = 3;

/// Takes a good step, then one that `spoil(layer_inputs)` spoils on rank 1, then a good one again. Every rank must throw in
/// the second, keep its state, and be able to go on. 3 channels fit into the head of a first exchange, 200 do not.
template <class Spoil>
void check_spoiled_step(Spoil const& spoil, std::vector<std::string> const& parts) {
  for (std::int64_t const channels : {3, 200})
    for (bool const first_step_good : {true, false})
      syncnorm::run_ranks(world_size, [&](syncnorm::thread_communicator const& comm) {
        layer_of_floats layer{comm, channels};
        step_inputs good{channels};
        auto const good_step = [&] {
          layer.forward(good.x_view, good.y_view);
          layer.backward(good.x_view, good.dy_view, good.dx_view);
        };
        if (first_step_good) good_step();
        auto const state = [&] {
          std::vector<float> all{static_cast<float>(layer.num_batches_tracked())};
          for (auto const values : {layer.running_mean(), layer.running_var(), layer.gamma_grad(), layer.beta_grad()})
            all.insert(all.end(), values.begin(), values.end());
          return all;
        };
        step_inputs bad{channels};
        auto const spoiled = comm.rank() == 1;
        if (spoiled) spoil(bad);
        auto expected = parts;
        expected.emplace_back("rank 1");
        bool const in_backward = parts.front() == "backward";
        if (in_backward) layer.forward(bad.x_view, bad.y_view);
        auto const before = state();
        test::check_throws<syncnorm::invalid_argument_error>(
            [&] {
              if (in_backward)
                layer.backward(bad.x_view, bad.dy_view, bad.dx_view);
              else
                layer.forward(bad.x_view, bad.y_view);
            },
            expected);
        CHECK(state() == before);
        good_step();
        CHECK(layer.num_batches_tracked() == static_cast<std::int64_t>(before.front()) + 1);
      });
}

/// Has no threads, of which it is asked first, while it is lost.
struct lost_executor {
  bool const* lost;

  [[nodiscard]] int concurrency() const {
    return *lost ? throw std::runtime_error{"no pool of threads " + std::string(200, '?')} : 1;
  }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    syncnorm::host::serial_executor{}.for_each(n, f);
  }
};

} // namespace

TEST_CASE("what is wrong with a forward pass on one rank is an error on every rank") {
  check_spoiled_step([](step_inputs& in) { in.x_view.data = nullptr; }, {"x is null"});
  check_spoiled_step([](step_inputs& in) { in.y_view.data = nullptr; }, {"y is null"});
  check_spoiled_step([](step_inputs& in) { in.x_view.channels = 2; }, {"x has 2 channels"});
  check_spoiled_step([](step_inputs& in) { in.x_view.samples = -1; }, {"negative extent", "[-1, "});
  check_spoiled_step([](step_inputs& in) { in.x_view.samples = std::int64_t{1} << 61; }, {"x has more elements"});
  check_spoiled_step([](step_inputs& in) { in.x_view.samples = in.x_view.spatial = std::int64_t{1} << 40; },
                     {"x has more elements"});
  check_spoiled_step([](step_inputs& in) { in.y_view.samples = 3; }, {"y is [3, ", "expected [4, "});
  check_spoiled_step([](step_inputs& in) { in.y_view.stride_s = 0; }, {"y has the strides", "its elements overlap"});
  check_spoiled_step([](step_inputs& in) { in.y_view.stride_n = 2; }, {"y has the strides [2, "});
  for (auto const far : {std::numeric_limits<std::int64_t>::min(), std::int64_t{1} << 51}) {
    std::string const strides = std::to_string(far) + ", 1], which no memory has room for";
    check_spoiled_step([&](step_inputs& in) { in.x_view.stride_c = far; }, {"x has the strides [", strides});
    check_spoiled_step([&](step_inputs& in) { in.y_view.stride_c = far; }, {"y has the strides [", strides});
  }
}

TEST_CASE("what is wrong with a backward pass on one rank is an error on every rank") {
  check_spoiled_step([](step_inputs& in) { in.dy_view.data = nullptr; }, {"backward", "dy is null"});
  check_spoiled_step([](step_inputs& in) { in.dy_view.samples = 3; }, {"backward", "dy is [3, "});
  check_spoiled_step([](step_inputs& in) { in.dx_view.data = nullptr; }, {"backward", "dx is null"});
  check_spoiled_step([](step_inputs& in) { in.dx_view.stride_n = 0; }, {"backward", "dx has the strides [0, "});
}

TEST_CASE("extents that cannot be counted are an error in every pass, before anything is counted") {
  syncnorm::batch_norm<float> layer{{}, 3};
  step_inputs in{3};
  layer.forward(in.x_view, in.y_view);
  auto too_many = in.x_view;
  too_many.samples = too_many.spatial = std::int64_t{1} << 40;
  syncnorm::tensor_view<float const> const x = too_many, dy = in.dy_view;
  std::vector<std::string> const said{"x has more elements than can be counted"};
  test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward(x, in.y_view); }, said);
  layer.forward(in.x_view, in.y_view);
  test::check_throws<syncnorm::invalid_argument_error>([&] { layer.backward(x, dy, in.dx_view); }, said);
  test::check_throws<syncnorm::invalid_argument_error>(
      [&] { layer.double_backward({.dx = in.x_view}, x, dy, in.y_view, in.dx_view); }, said);
  // Of what is wrong, nothing is kept: not of a channel that could not be recovered, nor by a number of elements that has wrapped.
  layer.gamma()[1] = 0;
  too_many.samples = (std::int64_t{1} << 32) + 1, too_many.spatial = std::int64_t{1} << 32;
  test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward_in_place(too_many); }, said);
  // Nor of no channels, whose positions the ranks would add up.
  syncnorm::batch_norm<float> empty{{}, 0};
  auto const none = syncnorm::nchw(in.x_view.data, std::int64_t{1} << 31, 0, std::int64_t{1} << 31);
  test::check_throws<syncnorm::invalid_argument_error>([&] { empty.forward(none, none); }, said);
}

TEST_CASE("what a pass writes over what it is yet to read, on one rank, is an error on every rank") {
  auto const turned = [](syncnorm::tensor_view<float> const& of) {
    return syncnorm::nhwc(of.data, of.samples, of.channels, of.spatial);
  };
  auto const backwards = [](syncnorm::tensor_view<float> of) {
    of.data += (of.samples - 1) * of.stride_n, of.stride_n = -of.stride_n;
    return of;
  };
  std::string const different = ", and are not the same";
  check_spoiled_step([&](step_inputs& in) { in.y_view = turned(in.x_view); },
                     {"y and x overlap in memory" + different});
  check_spoiled_step([&](step_inputs& in) { in.y_view = backwards(in.x_view); },
                     {"y and x overlap in memory" + different});
  check_spoiled_step([&](step_inputs& in) { in.dx_view = turned(in.dy_view); },
                     {"backward", "dx and dy overlap in memory" + different});
  check_spoiled_step([&](step_inputs& in) { in.dx_view = backwards(in.x_view); },
                     {"backward", "dx and x overlap in memory" + different});
}

TEST_CASE("outputs may be what they are made of, and lie between other elements") {
  using view = syncnorm::tensor_view<float>;
  using views = std::vector<view>;
  using epilogues = std::vector<syncnorm::batch_norm_epilogue<float>>;
  syncnorm::batch_norm<float> layer{{}, 2};
  std::vector<float> memory(400);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i % 11);
  auto const at = [&](std::int64_t first) { return syncnorm::nchw(memory.data() + first, 3, 2, 4); };
  auto const read = [](views const& of) {
    return std::vector<syncnorm::tensor_view<float const>>(of.begin(), of.end());
  };
  auto const forward = [&](views const& x, views const& y, epilogues const& with) { layer.forward(read(x), y, with); };
  auto const backward = [&](views const& x, views const& dy, views const& dx, views const& dr, epilogues const& with) {
    layer.backward(read(x), read(dy), dx, with, dr, {});
  };
  auto const refused = [](auto const& pass, std::string const& part) {
    test::check_throws<syncnorm::invalid_argument_error>(pass, {part});
  };
  auto const residual_at = [&](std::int64_t first) {
    return syncnorm::batch_norm_epilogue<float>{.residual = at(first)};
  };
  epilogues const none(2), residuals{residual_at(100), residual_at(130)};

  // Even and odd elements, and channels of one tensor each.
  forward({view{memory.data(), 3, 2, 4, 16, 8, 2}}, {view{memory.data() + 1, 3, 2, 4, 16, 8, 2}}, {});
  forward({view{memory.data(), 3, 2, 4, 16, 4, 1}}, {view{memory.data() + 8, 3, 2, 4, 16, 4, 1}}, {});
  forward({at(0), at(30)}, {at(0), at(130)}, residuals);
  backward({at(0), at(30)}, {at(60), at(160)}, {at(60), at(30)}, {at(100), at(160)}, residuals);

  refused(
      [&] {
        forward({view{memory.data(), 3, 2, 4, 16, 8, 1}}, {view{memory.data() + 1, 3, 2, 4, 16, 8, 2}}, {});
      },
      "y and x overlap in memory, and are not the same");
  refused([&] { forward({at(0), at(30)}, {at(200), at(31)}, none); }, "y[1] and x[1] overlap in memory, and are not");
  refused([&] { forward({at(0), at(30)}, {at(30), at(200)}, none); }, "y[0] and x[1] overlap in memory");
  refused([&] { forward({at(0), at(30)}, {at(200), at(200)}, none); }, "y[1] and y[0] overlap in memory");
  refused([&] { forward({at(0), at(30)}, {at(200), at(100)}, residuals); }, "y[1] and the residual[0] overlap");
  layer.eval();
  refused([&] { forward({at(0), at(30)}, {at(30), at(200)}, none); }, "inference: y[0] and x[1] overlap in memory");
  layer.train();
  forward({at(0), at(30)}, {at(200), at(230)}, residuals);
  auto const wrong_gradients = [&](views const& dx, views const& dr, std::string const& part) {
    refused([&] { backward({at(0), at(30)}, {at(60), at(160)}, dx, dr, residuals); }, part);
  };
  wrong_gradients({at(160), at(300)}, {}, "dx[0] and dy[1] overlap in memory");
  wrong_gradients({at(300), at(61)}, {}, "dx[1] and dy[0] overlap in memory");
  wrong_gradients({at(300), at(315)}, {}, "dx[1] and dx[0] overlap in memory");
  wrong_gradients({at(130), at(300)}, {}, "dx[0] and the residual[1] overlap in memory");
  wrong_gradients({at(300), at(330)}, {at(360), at(20)}, "dresidual[1] and x[0] overlap in memory");
  wrong_gradients({at(60), at(300)}, {at(330), at(60)}, "dresidual[1] and dy[0] overlap in memory");
  wrong_gradients({at(60), at(300)}, {at(60), at(330)}, "dx[0] and dresidual[0] overlap in memory");
  wrong_gradients({at(300), at(330)}, {at(331), at(360)}, "dx[1] and dresidual[0] overlap in memory");
}

TEST_CASE("options out of range on one rank are an error on every rank") {
  auto const nan = std::numeric_limits<double>::quiet_NaN();
  struct bad_options {
    syncnorm::batch_norm_options norm;
    char const* part;
  };
  auto const unnamed = []<class Enum>(Enum) { return static_cast<Enum>(9); };
  for (auto const& bad : std::initializer_list<bad_options>{
           {{.eps = -1e-5}, "eps is"},
           {{.eps = nan}, "eps is"},
           {{.momentum = -0.1}, "momentum is -0.1"},
           {{.momentum = 1.5}, "momentum is 1.5"},
           {{.momentum = nan}, "momentum"},
           {{.variance = unnamed(syncnorm::running_variance{})}, "the running variance is 9, expected 0 to 2"},
           {{.exchange = unnamed(syncnorm::exchange_policy{})}, "the exchange policy is 9, expected 0 to 2"},
           {{.normalize_by = unnamed(syncnorm::batch_variance{})},
            "the variance that normalizes is 9, expected 0 to 1"}})
    syncnorm::run_ranks(world_size, [&](syncnorm::thread_communicator const& comm) {
      auto const norm = comm.rank() == 2 ? bad.norm : syncnorm::batch_norm_options{};
      layer_of_floats layer{comm, 3, {.norm = norm}};
      step_inputs in{3};
      test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward(in.x_view, in.y_view); },
                                                           {"rank 2", bad.part});
      CHECK(layer.num_batches_tracked() == 0);
    });
}

TEST_CASE("a negative counter cannot be averaged by, and several passes on one rank are none if one is wrong") {
  syncnorm::batch_norm<float> layer{{}, 3, {.norm = {.momentum = {}}}};
  step_inputs in{3};
  layer.num_batches_tracked() = -1;
  test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward(in.x_view, in.y_view); },
                                                       {"num_batches_tracked is -1, expected at least 0"});
  CHECK(layer.running_mean()[0] == 0);
  for (auto const& momentum : {std::optional<double>{}, std::optional{0.5}}) {
    syncnorm::batch_norm<float> full{{}, 3, {.norm = {.momentum = momentum}}};
    full.num_batches_tracked() = std::numeric_limits<std::int64_t>::max();
    test::check_throws<syncnorm::invalid_argument_error>(
        [&] { full.forward(in.x_view, in.y_view); },
        {"num_batches_tracked is 9223372036854775807, the most that it can count"});
    CHECK(full.running_mean()[0] == 0);
  }

  syncnorm::batch_norm<float> good{{}, 3}, bad{{}, 3};
  auto one = in.x_view, out = in.y_view;
  one.samples = out.samples = one.spatial = out.spatial = 1;
  auto const passes = syncnorm::passes(good.plan_forward(in.x_view, in.y_view), bad.plan_forward(one, out));
  test::check_throws<syncnorm::invalid_argument_error>([&] { syncnorm::run_alone(passes); }, {"more than 1 value"});
  CHECK(good.num_batches_tracked() == 0);
}

TEST_CASE("extents that no pass can count by are refused, even of no elements") {
  syncnorm::batch_norm<float> layer{{}, 3};
  constexpr std::int64_t far = std::int64_t{1} << 62;
  for (auto const& extents : {std::array{far, std::int64_t{0}}, {0, far}}) {
    syncnorm::tensor_view<float> const none{nullptr, extents[0], 3, extents[1], 0, 0, 0};
    test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward(none, none); },
                                                         {"x has more elements than can be counted: ["});
  }
  layer.forward(syncnorm::nchw<float>(nullptr, 1 << 20, 3, 0), syncnorm::nchw<float>(nullptr, 1 << 20, 3, 0));
  CHECK(layer.num_batches_tracked() == 0);
}

TEST_CASE("one value per channel over all ranks cannot be trained on") {
  for (int const size : {1, 2, 3})
    syncnorm::run_ranks(size, [&](syncnorm::thread_communicator const& comm) {
      layer_of_floats layer{comm, 2};
      std::vector<float> x{1, 2}, y(2);
      std::int64_t const samples = comm.rank() == 0 ? 1 : 0;
      auto const step = [&] { layer.forward(syncnorm::nc(x.data(), samples, 2), syncnorm::nc(y.data(), samples, 2)); };
      test::check_throws<syncnorm::invalid_argument_error>(step, {"more than 1 value per channel"});
      CHECK(layer.num_batches_tracked() == 0);
      layer.eval();
      step(); // inference may
    });
}

TEST_CASE("a backward pass needs a forward pass") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    layer_of_floats layer{comm, 3};
    step_inputs in{3};
    test::check_throws<syncnorm::invalid_argument_error>([&] { layer.backward(in.x_view, in.dy_view, in.dx_view); },
                                                         {"was there a forward pass?"});
  });
}

TEST_CASE("a forward pass that fails leaves nothing for a backward pass") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    layer_of_floats layer{comm, 3};
    step_inputs in{3};
    auto const check_backward = [&] {
      test::check_throws<syncnorm::invalid_argument_error>([&] { layer.backward(in.x_view, in.dy_view, in.dx_view); },
                                                           {"was there a forward pass?"});
      for (float const gradient : layer.gamma_grad()) CHECK(gradient == 0);
    };
    auto bad = in.x_view;
    bad.data = comm.rank() == 1 ? nullptr : bad.data;
    layer.forward(in.x_view, in.y_view);
    CHECK_THROWS_AS(layer.forward(bad, in.y_view), syncnorm::invalid_argument_error);
    check_backward();
    layer.forward(in.x_view, in.y_view);
    auto pending = layer.begin_forward(bad, in.y_view);
    CHECK_THROWS_AS(pending.finish(), syncnorm::invalid_argument_error);
    check_backward();
    layer.forward(in.x_view, in.y_view);
    layer.eval();
    if (comm.rank() == 1) { // alone, as passes in evaluation are
      CHECK_THROWS_AS(layer.forward(bad, in.y_view), syncnorm::invalid_argument_error);
      check_backward();
    }
  });
}

TEST_CASE("parameters of a wrong size on one rank are an error on every rank") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    step_inputs in{3};
    std::vector<float> const gamma(comm.rank() == 0 ? 3 : 2, 1.0F);
    std::vector<float> mean(3), var(3);
    test::check_throws<syncnorm::invalid_argument_error>(
        [&] {
          (void)syncnorm::batch_norm_forward(serial, comm, in.x_view, in.y_view,
                                             syncnorm::affine_parameters<float>{gamma, {}});
        },
        {"rank 1", "gamma has 2 elements, expected 3"});
    std::int64_t batches = 0;
    test::check_throws<syncnorm::invalid_argument_error>(
        [&] {
          (void)syncnorm::batch_norm_forward(
              serial, comm, in.x_view, in.y_view, {},
              syncnorm::running_statistics<float>{mean, var, comm.rank() == 0 ? &batches : nullptr},
              {.momentum = std::nullopt});
        },
        {"rank 1", "num_batches_tracked"});
    CHECK(batches == 0);
  });
}

TEST_CASE("a peer that never comes is an error within the timeout") {
  syncnorm::thread_group const group{2, std::chrono::milliseconds{100}};
  layer_of_floats layer{group.communicator(0), 3};
  step_inputs in{3};
  CHECK_THROWS_AS(layer.forward(in.x_view, in.y_view), syncnorm::timeout_error);
  CHECK(layer.num_batches_tracked() == 0);
  for (float const value : layer.running_var()) CHECK(value == 1.0F);
}

TEST_CASE("what a rank's own sums throw is an error on every rank") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    syncnorm::run_ranks(world_size, [&](syncnorm::thread_communicator const& comm) {
      int uses = 0;
      syncnorm::batch_norm<float, syncnorm::thread_communicator, test::failing_executor> layer{
          comm, 200, {.norm = {.exchange = policy}}, {&uses, comm.rank() == 1 ? 1 : 0}};
      step_inputs good{200};
      test::check_throws<syncnorm::invalid_argument_error>([&] { layer.forward(good.x_view, good.y_view); },
                                                           {"batch_norm forward", "rank 1", "no threads"});
      CHECK(layer.num_batches_tracked() == 0);
      layer.forward(good.x_view, good.y_view);
      layer.backward(good.x_view, good.dy_view, good.dx_view);
      CHECK(layer.num_batches_tracked() == 1);
      uses = comm.rank() == 1 ? 0 : 1;
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] { layer.double_backward({.dx = good.dy_view}, good.x_view, good.dy_view, good.y_view, good.dx_view); },
          {"2nd backward", "rank 1", "no threads"});
    });
}

TEST_CASE("an executor that cannot tell its concurrency on one rank is an error on every rank") {
  syncnorm::run_ranks(world_size, [&](syncnorm::thread_communicator const& comm) {
    bool lost = comm.rank() == 1;
    syncnorm::batch_norm<float, syncnorm::thread_communicator, lost_executor> layer{comm, 5, {}, {&lost}};
    step_inputs good{5};
    auto const forward = [&] { layer.forward(good.x_view, good.y_view); };
    auto const backward = [&] { layer.backward(good.x_view, good.dy_view, good.dx_view); };
    test::check_throws<syncnorm::invalid_argument_error>(forward,
                                                         {"batch_norm forward", "rank 1", "no pool", "???..."});
    lost = false;
    forward(), backward();
    lost = comm.rank() == 1;
    test::check_throws<syncnorm::invalid_argument_error>(backward,
                                                         {"batch_norm backward", "rank 1", "no pool", "???..."});
    CHECK(layer.num_batches_tracked() == 1);
  });
}

TEST_CASE("what a rank throws between the parts of a pass ends it on every rank, or there alone after the last") {
  constexpr std::int64_t channels = 40, spatial = 4096; // cut into blocks of 16 and 8, or into halves
  for (double const overhead : {0.0, 6e-6})
    for (bool const backward : {false, true}) {
      if (test::sanitized && backward != (overhead == 0)) continue;
      int failing = 1, everywhere = 0, alone = 0;
      for (bool thrown = true; thrown; ++failing) {
        std::array<std::string, world_size> texts, of_backward;
        syncnorm::run_ranks(
            world_size,
            [&](syncnorm::thread_communicator const& comm) {
              bool const fails = comm.rank() == 1;
              int uses = failing;
              syncnorm::batch_norm<float, quick_communicator, test::failing_executor> layer{
                  quick_communicator{comm, overhead}, channels, {}, {&uses, failing}};
              std::vector<float> x(static_cast<std::size_t>(2 * channels * spatial)), y(x.size());
              for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
              auto const view = [&](std::vector<float>& of) { return syncnorm::nchw(of.data(), 2, channels, spatial); };
              auto const pass = [&] {
                if (backward)
                  layer.backward(view(x), view(x), view(y));
                else
                  layer.forward(view(x), view(y));
              };
              layer.forward(view(x), view(y));
              pass(); // from now on in parts
              std::vector const before(layer.running_mean().begin(), layer.running_mean().end());
              std::vector const gradient(layer.gamma_grad().begin(), layer.gamma_grad().end());
              uses = fails ? 0 : failing;
              auto const rank = static_cast<std::size_t>(comm.rank());
              texts[rank] = test_support::thrown(pass);
              if (!texts[rank].empty()) {
                CHECK(std::ranges::equal(before, layer.running_mean()));
                CHECK(std::ranges::equal(gradient, layer.gamma_grad()));
              }
              uses = failing;
              if (!backward)
                of_backward[rank] = test_support::thrown([&] { layer.backward(view(x), view(x), view(y)); });
              layer.forward(view(x), view(y)); // the ranks are in step
            },
            std::chrono::seconds{10});
        CAPTURE(failing);
        thrown = !texts[1].empty();
        if (thrown) CHECK_MESSAGE(texts[1].find("no threads") != std::string::npos, texts[1]);
        CHECK(texts[0] == texts[2]);
        if (!backward && thrown) CHECK(of_backward[0].find("was there a forward pass?") != std::string::npos);
        CHECK((of_backward[1] == of_backward[0] && of_backward[2] == of_backward[0]));
        everywhere += texts[0].empty() ? 0 : 1;
        alone += thrown && texts[0].empty() ? 1 : 0;
        if (!texts[0].empty()) CHECK_MESSAGE(texts[0].find(": rank 1") != std::string::npos, texts[0]);
      }
      // Where the next block is summed while one is written, no executor has a part in that.
      bool const by_executor = !syncnorm::host::detail::processor::here().foresees;
      CHECK(everywhere >= (overhead != 0 ? 2 : by_executor ? 3 : 1));
      if (overhead != 0 && !backward) CHECK(alone > 0);
    }
}

TEST_CASE("a communicator that breaks its contract gives an error, not wrong statistics") {
  using contract::broken;
  using enum syncnorm::exchange_policy;
  struct {
    broken comm;
    syncnorm::exchange_policy policy;
    std::string error;
  } const cases[] = {
      {{0, 2, broken::places::none}, gather, "allgather: the communicator did not leave what rank 0 sent"},
      {{0, 2, broken::places::last}, gather, "allgather: the communicator did not leave what rank 0 sent"},
      {{1, 2, broken::places::none}, reduce, "allgather: the communicator did not leave what rank 1 sent"},
      {{0, 2, broken::places::all}, reduce, "exchange: the allreduce gave a wrong sum"},
      {{-1, 2, broken::places::all}, gather, "communicator: it says that this is rank -1 of 2"},
      {{2, 2, broken::places::all}, gather, "communicator: it says that this is rank 2 of 2"},
      {{0, 0, broken::places::all}, gather, "communicator: it says that it has 0 ranks"},
      {{0, -1, broken::places::all}, gather, "communicator: it says that it has -1 ranks"},
  };
  for (auto const& wrong : cases)
    for (std::int64_t const channels : {3, 200})
      for (bool const two_phases : {false, true}) {
        CAPTURE(wrong.error);
        CAPTURE(channels);
        CAPTURE(two_phases);
        syncnorm::batch_norm<float, broken> layer{wrong.comm, channels, {.norm = {.exchange = wrong.policy}}};
        step_inputs in{channels};
        test::check_throws<syncnorm::communicator_error>(
            [&] {
              if (two_phases)
                layer.begin_forward(in.x_view, in.y_view).finish();
              else
                layer.forward(in.x_view, in.y_view);
            },
            {wrong.error});
        CHECK(layer.num_batches_tracked() == 0);
      }
}
