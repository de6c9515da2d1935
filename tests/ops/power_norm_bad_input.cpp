#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <comm/broken.hpp>
#include <ops/power_norm_steps.hpp>
#include <support/throws.hpp>

using test::step_inputs;
using test::watched_layer;

namespace {

constexpr int ranks = test::step_ranks;
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr double no_number = std::numeric_limits<double>::quiet_NaN();

/// Another layout of the same memory.
syncnorm::tensor_view<float> turned(syncnorm::tensor_view<float> const& of) {
  return syncnorm::nhwc(of.data, of.samples, of.channels, of.spatial);
}

/// Which call tells a rank of a forward pass that failed on another: that pass itself in the warm-up; afterwards the first
/// that needs its result.
enum class teller { itself, backward, next_forward, synchronize, state, evaluation };
/// The same of a backward pass, whose exchange is always in flight, once ranks have agreed on their channels.
enum class backward_teller { next_backward, synchronize, state };

/// Takes good steps, then a forward pass that `spoil(inputs)` spoils on rank 1, then good steps again. Every rank must throw
/// the same, keep its state, and be able to go on.
void check_spoiled_forward(std::function<void(step_inputs&)> const& spoil, std::vector<std::string> parts,
                           bool on_rank_1 = true) {
  parts.emplace_back("power_norm forward: ");
  if (on_rank_1) parts.emplace_back("rank 1: ");
  for (std::int64_t const channels : {4, 200})
    for (auto const how : {teller::itself, teller::backward, teller::next_forward, teller::synchronize, teller::state,
                           teller::evaluation})
      for (int const good_steps : {0, 2}) {
        if (how != teller::itself && good_steps == 0) continue; // the first pass of all waits
        syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
          watched_layer watched{comm, channels, {.warmup_iters = how == teller::itself ? 100 : 1}};
          auto& layer = watched.layer;
          step_inputs good{channels}, bad{channels};
          auto const good_step = [&] { good.forward(layer), good.backward(layer); };
          for (int step = 0; step < good_steps; ++step) good_step();
          auto const before = watched.state();
          if (comm.rank() == 1) spoil(bad);
          test::check_throws<syncnorm::invalid_argument_error>(
              [&] {
                bad.forward(layer);
                CHECK(how != teller::itself);
                if (how == teller::backward) bad.backward(layer);
                if (how == teller::next_forward) good.forward(layer);
                if (how == teller::synchronize) layer.synchronize();
                if (how == teller::state) (void)layer.running_phi();
                if (how != teller::evaluation) return;
                layer.eval();
                good.forward(layer);
              },
              parts);
          layer.train();
          CHECK(watched.state() == before);
          // The backward pass of a pass that failed fails, and no rank is left alone in it.
          CHECK_THROWS_AS(bad.backward(layer), syncnorm::invalid_argument_error);
          CHECK(watched.state() == before);
          good_step();
          good_step();
          CHECK(layer.iters() == good_steps + 2);
        });
      }
}

void check_spoiled_backward(std::function<void(step_inputs&)> const& spoil, std::vector<std::string> parts,
                            bool on_rank_1 = true) {
  parts.emplace_back("power_norm backward: ");
  if (on_rank_1) parts.emplace_back("rank 1: ");
  for (std::int64_t const channels : {4, 200})
    for (auto const how : {backward_teller::next_backward, backward_teller::synchronize, backward_teller::state})
      syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
        watched_layer watched{comm, channels, {.warmup_iters = 1}};
        auto& layer = watched.layer;
        step_inputs good{channels}, bad{channels};
        for (int step = 0; step < 2; ++step) good.forward(layer), good.backward(layer);
        bad.forward(layer);
        auto const before = watched.state();
        if (comm.rank() == 1) spoil(bad);
        test::check_throws<syncnorm::invalid_argument_error>(
            [&] {
              bad.backward(layer);
              if (how == backward_teller::synchronize) layer.synchronize();
              if (how == backward_teller::state) (void)layer.iters();
              good.forward(layer); // does not need ema_gz
              good.backward(layer);
            },
            parts);
        layer.synchronize();
        auto now = watched.state();
        if (how == backward_teller::next_backward) {
          CHECK(now[0] == before[0] + 1); // that of the forward pass in between
          CHECK(std::equal(now.end() - channels, now.end(), before.end() - channels));
        } else {
          CHECK(now == before);
        }
        auto const iters = layer.iters();
        good.forward(layer), good.backward(layer);
        CHECK(layer.iters() == iters + 1);
        CHECK_FALSE(std::equal(before.end() - channels, before.end(), layer.ema_gz().begin()));
      });
}

/// Is out of threads while `*fails` says so.
struct executor_at_times {
  bool const* fails;

  [[nodiscard]] int concurrency() const { return 1; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    if (*fails) throw std::runtime_error{""};
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

/// Is out of threads after so many calls.
struct executor_for_a_while {
  int* calls;

  [[nodiscard]] int concurrency() const { return 1; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    if (--*calls < 0) throw std::runtime_error{""};
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

} // namespace

TEST_CASE("what is wrong with a forward pass on one rank is an error on every rank") {
  check_spoiled_forward([](step_inputs& in) { in.x_view.data = nullptr; }, {"x is null"});
  check_spoiled_forward([](step_inputs& in) { in.y_view.data = nullptr; }, {"y is null"});
  check_spoiled_forward([](step_inputs& in) { in.y_view = turned(in.x_view); },
                        {"y and x overlap in memory, and are not the same"});
  check_spoiled_forward([](step_inputs& in) { in.x_view.channels = 2; }, {"x has 2 channels"});
  check_spoiled_forward([](step_inputs& in) { in.x_view.samples = -1; }, {"negative extent", "[-1, "});
  check_spoiled_forward([](step_inputs& in) { in.y_view.samples = 3; }, {"y is [3, ", "expected [4, "});
  check_spoiled_forward([](step_inputs& in) { in.y_view.stride_s = 0; }, {"y has the strides", "its elements overlap"});
  check_spoiled_forward([](step_inputs& in) { in.mask.samples = 5; }, {"the mask is [5, 5], expected [4, 5]"});
  check_spoiled_forward([](step_inputs& in) { in.mask.spatial = 4; }, {"the mask is [4, 4], expected [4, 5]"});
  check_spoiled_forward([](step_inputs& in) { in.mask.data = nullptr; }, {"the mask is null"});
}

TEST_CASE("a second moment that is no number is an error on every rank") {
  std::vector<std::string> const parts{"running_phi of channel 1 would become", "the state is unchanged"},
      named{"running_phi of channel 1 would become", " by the sum of rank 1; the state is unchanged"};
  auto const set = [](float value) { return [value](step_inputs& in) { in.x_view(2, 1, 1) = value; }; };
  check_spoiled_forward(set(inf), named, false);
  check_spoiled_forward(set(static_cast<float>(no_number)), named, false);
  check_spoiled_forward(set(1e30F), parts, false); // its square
  // In padding it does not matter to the second moment.
  syncnorm::run_ranks(ranks, [](syncnorm::thread_communicator const& comm) {
    watched_layer watched{comm, 4};
    step_inputs in{4};
    in.x_view(0, 1, 3) = inf;
    in.forward(watched.layer);
    CHECK(watched.layer.iters() == 1);
  });
}

TEST_CASE("outputs of a warm-up that begins again are no numbers where the next call throws") {
  for (bool const bad_shape : {false, true})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      std::vector<double> x{1, 2, 3, 5, 7, 11}, y(6), dx(6);
      auto const view = [](std::vector<double>& of) { return syncnorm::nc(of.data(), 2, 3); };
      syncnorm::power_norm<double, syncnorm::thread_communicator> layer{comm, 3, {.norm = {.warmup_iters = 2}}};
      for (int step = 0; step < 4; ++step) {
        layer.forward(view(x), view(y));
        layer.backward(view(x), view(x), view(dx));
      }
      layer.synchronize();
      layer.iters() = 0;
      bool const here = comm.rank() == 1;
      auto given = view(x);
      if (here && bad_shape) given.channels = 2;
      if (here && !bad_shape) x[0] = no_number;
      std::ranges::fill(y, 42.0);
      layer.forward(given, view(y));
      if (here && bad_shape)
        CHECK(std::ranges::all_of(y, [](double value) { return value == 42; }));
      else
        CHECK(std::ranges::all_of(y, [](double value) { return std::isnan(value); }));
      test::check_throws<syncnorm::invalid_argument_error>([&] { layer.synchronize(); }, {"power_norm forward"});
      x[0] = 1;
      layer.forward(view(x), view(y));
      CHECK(std::ranges::none_of(y, [](double value) { return std::isnan(value); }));
      CHECK(layer.iters() == 1);
    });
}

TEST_CASE("what is wrong with a backward pass on one rank is an error on every rank") {
  check_spoiled_backward([](step_inputs& in) { in.dy_view.data = nullptr; }, {"dy is null"});
  check_spoiled_backward([](step_inputs& in) { in.dy_view.samples = 3; }, {"dy is [3, "});
  check_spoiled_backward([](step_inputs& in) { in.dx_view = turned(in.dy_view); },
                         {"dx and dy overlap in memory, and are not the same"});
  check_spoiled_backward([](step_inputs& in) { in.dx_view.data = nullptr; }, {"dx is null"});
  check_spoiled_backward([](step_inputs& in) { in.dx_view.stride_n = 0; }, {"dx has the strides [0, "});
  check_spoiled_backward([](step_inputs& in) { in.x_view.data = nullptr; }, {"x is null"});
  check_spoiled_backward([](step_inputs& in) { in.x_view.spatial = 4; }, {"x has 4 samples of 4"});
  check_spoiled_backward([](step_inputs& in) { in.dy_view(1, 2, 3) = inf; },
                         {"ema_gz of channel 2 would become", " by the sum of rank 1"}, false);
}

TEST_CASE("what a rank's own sums of a power norm throw is an error on every rank") {
  for (std::int64_t const warmup : {0, 100})
    syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
      bool fails = false;
      syncnorm::power_norm<float, syncnorm::thread_communicator, executor_at_times> layer{
          comm, 4, {.norm = {.warmup_iters = warmup}}, {&fails}};
      step_inputs in{4};
      auto const forward = [&] { layer.forward(in.x_view, in.y_view); };
      auto const backward = [&] { layer.backward(in.x_view, in.dy_view, in.dx_view), layer.synchronize(); };
      forward(), backward();
      std::vector<float> const ema_gz(layer.ema_gz().begin(), layer.ema_gz().end());
      std::vector<float> const gradient(layer.gamma_grad().begin(), layer.gamma_grad().end());
      fails = comm.rank() == 1;
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] { forward(), backward(); }, {"power_norm forward: rank 1: an exception without a message"});
      fails = false;
      forward();
      fails = comm.rank() == 1;
      test::check_throws<syncnorm::invalid_argument_error>(
          backward, {"power_norm backward: rank 1: an exception without a message"});
      CHECK(std::ranges::equal(layer.ema_gz(), ema_gz));
      if (fails) CHECK(std::ranges::equal(layer.gamma_grad(), gradient));
      fails = false;
      forward(), backward();
      CHECK(layer.iters() == 3);
    });
}

TEST_CASE(
    "what a rank's executor throws after the exchange of a warm-up is an error on every rank in its backward pass") {
  syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
    int calls = 1000; // until it is out of threads
    syncnorm::power_norm<float, syncnorm::thread_communicator, executor_for_a_while> layer{
        comm, 4, {.norm = {.warmup_iters = 100}}, {&calls}};
    step_inputs in{4};
    auto const backward = [&] { layer.backward(in.x_view, in.dy_view, in.dx_view), layer.synchronize(); };
    layer.forward(in.x_view, in.y_view), backward();
    int const before = calls = 1000;
    layer.forward(in.x_view, in.y_view), backward();
    int const of_step = before - calls;
    bool thrown_late = false;
    // At each of its calls in turn, of which the last of a forward pass comes after the exchange.
    for (int n = 0; n < of_step; ++n) {
      auto const steps = layer.iters();
      calls = comm.rank() == 1 ? n : 1000;
      bool threw = false;
      try {
        layer.forward(in.x_view, in.y_view);
      } catch (std::runtime_error const&) {
        threw = true;
      }
      bool const moved = layer.iters() == steps + 1;
      thrown_late = thrown_late || (threw && moved);
      if (comm.rank() == 1 && threw) calls = 1000;
      if (!moved) continue; // on no rank
      bool failed = false;
      try {
        backward();
      } catch (syncnorm::invalid_argument_error const&) {
        failed = true;
      }
      CHECK(failed);
      calls = 1000;
      layer.forward(in.x_view, in.y_view), backward();
    }
    CHECK(thrown_late == (comm.rank() == 1));
  });
}

TEST_CASE("a single rank throws at once, in the warm-up and after it") {
  for (std::int64_t const warmup : {0, 100}) {
    syncnorm::power_norm<float> layer{syncnorm::self_communicator{}, 4, {.norm = {.warmup_iters = warmup}}};
    step_inputs in{4};
    auto const forward = [&] { layer.forward(in.x_view, in.y_view, in.mask); };
    auto const backward = [&] { layer.backward(in.x_view, in.dy_view, in.dx_view); };
    forward();
    backward();
    in.mask.samples = 3;
    test::check_throws<syncnorm::invalid_argument_error>(forward, {"power_norm forward: the mask is [3, 5]"});
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"there was no forward pass"});
    in.mask.samples = 4;
    forward();
    in.x_view(0, 0, 0) = inf;
    test::check_throws<syncnorm::invalid_argument_error>(forward, {"running_phi of channel 0 would become inf"});
    CHECK(layer.iters() == 2);
    in.x_view(0, 0, 0) = 1;
    in.dy_view.data = nullptr;
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"running_phi of channel 0"});
    forward();
    test::check_throws<syncnorm::invalid_argument_error>(backward, {"power_norm backward: dy is null"});
    CHECK_FALSE(layer.in_flight());
    CHECK(layer.iters() == 3);
  }
}

TEST_CASE("options out of range on one rank are an error on every rank") {
  struct bad_options {
    syncnorm::power_norm_options norm;
    char const* part;
  };
  for (auto const& bad : std::initializer_list<bad_options>{{{.eps = -1e-5}, "eps is"},
                                                            {{.eps = no_number}, "eps is"},
                                                            {{.alpha_forward = -0.1}, "alpha_forward is -0.1"},
                                                            {{.alpha_forward = no_number}, "alpha_forward is"},
                                                            {{.alpha_backward = 1.5}, "alpha_backward is 1.5"},
                                                            {{.warmup_iters = -1}, "warmup_iters is -1"},
                                                            {{.groups = 4}, "6 channels cannot be divided into 4"},
                                                            {{.groups = -2}, "6 channels cannot be divided into -2"},
                                                            {{.groups = 2, .group_eps = -1}, "group_eps is -1"}})
    syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
      watched_layer watched{comm, 6, comm.rank() == 2 ? bad.norm : syncnorm::power_norm_options{}};
      step_inputs in{6};
      test::check_throws<syncnorm::invalid_argument_error>([&] { in.forward(watched.layer); }, {"rank 2", bad.part});
      CHECK(watched.layer.iters() == 0);
    });
}

TEST_CASE("where no position of any rank counts, the state is unchanged and running_phi normalizes") {
  for (bool const corrected : {false, true})
    for (std::int64_t const warmup : {2, 100})
      for (bool const empty : {false, true})
        syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
          syncnorm::power_norm_options const options{.warmup_iters = warmup,
                                                     .recursion = corrected
                                                                      ? syncnorm::power_norm_recursion::corrected
                                                                      : syncnorm::power_norm_recursion::reference};
          watched_layer watched{comm, 4, options};
          auto& layer = watched.layer;
          step_inputs in{4}, hidden{4};
          for (int step = 0; step < 3; ++step) in.forward(layer), in.backward(layer);
          auto const before = watched.state();
          std::ranges::fill(hidden.mask_values, std::uint8_t{0});
          if (empty) {
            for (auto* const view : {&hidden.x_view, &hidden.y_view, &hidden.dy_view, &hidden.dx_view})
              view->samples = 0;
            hidden.mask.samples = 0;
          }
          for (int again = 0; again < 2; ++again) {
            hidden.forward(layer);
            hidden.backward(layer);
          }
          CHECK(watched.state() == before);
          if (empty) return;
          auto const phi = [&](std::int64_t c) { return static_cast<double>(layer.running_phi()[std::size_t(c)]); };
          auto const ema = [&](std::int64_t c) { return static_cast<double>(layer.ema_gz()[std::size_t(c)]); };
          for (std::int64_t c = 0; c < 4; ++c) {
            double const root = std::sqrt(phi(c) + 1e-5), z = hidden.x_view(1, c, 2) / root;
            CHECK(hidden.y_view(1, c, 2) == doctest::Approx(z).epsilon(1e-5));
            double const gh = hidden.dy_view(1, c, 2) - 0.1 * ema(c) * z;
            CHECK(hidden.dx_view(1, c, 2) == doctest::Approx(corrected ? 0 : gh / root).epsilon(1e-4));
          }
          in.forward(layer), in.backward(layer);
          CHECK(layer.iters() == 4);
        });
}

TEST_CASE("samples without positions, however many, are gone through by none") {
  for (auto const recursion : {syncnorm::power_norm_recursion::reference, syncnorm::power_norm_recursion::corrected}) {
    syncnorm::power_norm<double> layer{{}, 1, {.norm = {.recursion = recursion}}};
    std::uint8_t const counted = 1;
    constexpr std::int64_t samples = std::int64_t{1} << 40;
    syncnorm::tensor_view<double> const none{nullptr, samples, 1, 0, 0, 0, 0};
    layer.forward(none, none, {&counted, samples, 0, 0, 0});
    CHECK(layer.iters() == 0);
  }
}

TEST_CASE("a backward pass needs a forward pass, on every rank") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    watched_layer watched{comm, 4};
    step_inputs in{4};
    test::check_throws<syncnorm::invalid_argument_error>([&] { in.backward(watched.layer); },
                                                         {"rank 0: there was no forward pass"});
    in.forward(watched.layer), in.backward(watched.layer);
    // Rank 1 hands in a pass that is none; both hear of it.
    test::check_throws<syncnorm::invalid_argument_error>(
        [&] {
          auto const saved = comm.rank() == 0 ? watched.layer.saved() : syncnorm::power_norm_saved{};
          watched.layer.backward(saved, in.x_view, in.dy_view, in.dx_view);
          watched.layer.synchronize();
        },
        {"rank 1: there was no forward pass"});
  });
}

TEST_CASE("a backward pass by what a layer of other channels has left is an error on every rank") {
  for (std::int64_t const others : {2, 64})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      watched_layer watched{comm, 4}, other{comm, others};
      step_inputs in{4}, more{others};
      in.forward(watched.layer), in.backward(watched.layer);
      more.forward(other.layer);
      in.forward(watched.layer);
      auto const before = watched.state();
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] {
            auto const saved = comm.rank() == 0 ? watched.layer.saved() : other.layer.saved();
            watched.layer.backward(saved, in.x_view, in.dy_view, in.dx_view);
            watched.layer.synchronize();
          },
          {"rank 1: the forward pass had " + std::to_string(others) + " channels, expected 4"});
      CHECK(watched.state() == before);
      in.backward(watched.layer);
      watched.layer.synchronize();
    });
}

TEST_CASE("backward passes by constant statistics may be in several threads at once") {
  step_inputs in{4};
  std::vector<float> phi(4, 2), ema(4, 1);
  std::int64_t iters = 9;
  syncnorm::self_communicator const self;
  syncnorm::power_norm_workspace<syncnorm::self_communicator, float> workspace{4};
  syncnorm::power_norm_saved saved;
  syncnorm::power_norm_state<float> const state{phi, ema, &iters};
  syncnorm::power_norm_inference<float, float>(syncnorm::host::serial_executor{}, in.x_view, in.y_view, {}, phi, {},
                                               saved);
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const&) {
    step_inputs own{4};
    syncnorm::power_norm_backward<float const, float>(syncnorm::host::serial_executor{}, self, own.dy_view, own.x_view,
                                                      own.dx_view, {}, state, {}, saved, {}, workspace);
    CHECK(own.dx[0] == doctest::Approx(own.dy[0] / std::sqrt(2 + 1e-5)));
  });
}

TEST_CASE("parameters and states of a wrong size on one rank are an error on every rank") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    step_inputs in{4};
    std::vector<float> const gamma(comm.rank() == 0 ? 4 : 3, 1.0F);
    std::vector<float> phi(4, 1), ema(4), small(comm.rank() == 0 ? 4 : 2);
    std::int64_t iters = 0;
    syncnorm::power_norm_workspace<syncnorm::thread_communicator, float> workspace{4};
    syncnorm::power_norm_saved saved;
    auto const forward = [&](std::span<float const> weights, std::span<float> of_ema, std::int64_t* steps) {
      syncnorm::power_norm_forward<float, float>(syncnorm::host::serial_executor{}, comm, in.x_view, in.y_view, {},
                                                 {weights, {}}, {phi, of_ema, steps}, {}, saved, workspace);
    };
    test::check_throws<syncnorm::invalid_argument_error>([&] { forward(gamma, ema, &iters); },
                                                         {"rank 1: gamma has 3 elements, expected 4"});
    test::check_throws<syncnorm::invalid_argument_error>([&] { forward({}, small, &iters); },
                                                         {"rank 1: ema_gz has 2 elements, expected 4"});
    test::check_throws<syncnorm::invalid_argument_error>([&] { forward({}, ema, comm.rank() == 0 ? &iters : nullptr); },
                                                         {"rank 1: iters is null"});
    forward({}, ema, &iters);
    CHECK(iters == 1);
  });
}

TEST_CASE("a communicator that breaks its contract gives an error, not wrong statistics") {
  using contract::broken;
  for (auto const delivered : {broken::places::none, broken::places::last})
    for (std::int64_t const channels : {4, 200})
      for (std::int64_t const warmup : {0, 9}) {
        syncnorm::power_norm<float, broken> layer{{0, 2, delivered}, channels, {.norm = {.warmup_iters = warmup}}};
        step_inputs in{channels};
        test::check_throws<syncnorm::communicator_error>(
            [&] {
              layer.forward(in.x_view, in.y_view);
              layer.synchronize();
            },
            {"allgather: the communicator did not leave what rank 0 sent"});
        CHECK(layer.iters() == 0);
      }
}
