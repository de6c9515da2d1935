#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <comm/counted.hpp>
#include <ops/pending_cases.hpp>
#include <support/failing_executor.hpp>
#include <support/message_of.hpp>
#include <support/throws.hpp>

// What a pass leaves for those after it, whatever comes between.
namespace {

using namespace std::chrono_literals;
using syncnorm::exchange_policy;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using invalid = syncnorm::invalid_argument_error;
using test_support::contains;
using test_support::message_of;
using data_over_threads = test::layer_data<float, thread_communicator>;

/// Of two samples, two channels and two positions.
template <class Values>
auto small_view(Values& values) {
  return syncnorm::nchw(values.data(), 2, 2, 2);
}

} // namespace

TEST_CASE("a training pass between the phases of a backward pass makes that an error, though it fails") {
  run_ranks(2, [](thread_communicator const& comm) {
    data_over_threads data{comm, 3, exchange_policy::gather};
    data.step();
    auto const later = [&](auto const& between) {
      auto backward = data.layer.begin_backward(data.x(), data.dy(), data.dx());
      between();
      auto const state = data.state();
      auto const text = message_of<invalid>([&] { backward.finish(); });
      CHECK_MESSAGE(contains(text, "another forward pass since this one began"), text);
      CHECK(data.state() == state);
    };
    later([&] { data.layer.forward(data.dy(), data.y()); });
    data.step();
    auto null = data.x();
    null.data = nullptr;
    later([&] { CHECK_THROWS_AS(data.layer.forward(null, data.y()), invalid); });
  });
}

TEST_CASE("a training pass after one in place leaves no way back from that") {
  std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, dx(8), out(8);
  std::vector<float> const dy(8, 1), other(8, 3);
  syncnorm::batch_norm<float> layer{{}, 2};
  layer.forward_in_place(small_view(x));
  layer.forward(small_view(other), small_view(out));
  auto const y = x;
  test::check_throws<invalid>([&] { layer.backward_in_place(small_view(x), small_view(dy), small_view(dx)); },
                              {"the latest forward pass was not in place"});
  CHECK(x == y);
}

TEST_CASE("double backward of this rank alone needs no other") {
  run_ranks(
      2,
      [](thread_communicator const& comm) {
        std::vector<float> const x{1, 2, 3, 5, 7, 11, 13, 17}, dy(8, 1);
        std::vector<float> dx(8), out(8);
        for (bool const tracks : {true, false}) {
          syncnorm::batch_norm<float, thread_communicator> layer{comm, 2, {.track_running_stats = tracks}};
          layer.train(tracks); // else the statistics are of this rank
          layer.forward(small_view(x), small_view(out));
          layer.backward(small_view(x), small_view(dy), small_view(dx));
          if (comm.rank() == 0)
            layer.double_backward({.dx = small_view(std::as_const(dx))}, small_view(x), small_view(dy), {},
                                  small_view(out), {}, {.exchange = !tracks});
        }
      },
      500ms);
}

TEST_CASE("evaluation of another batch than the latest in training has a backward pass, and that one, too") {
  std::vector<float> const x{1, 2, 3, 5, 7, 11, 13, 17};
  std::vector<float> dx(8), y(8);
  syncnorm::batch_norm<float> layer{{}, 2};
  layer.forward(small_view(x), small_view(y));
  layer.eval();
  auto const part = [](auto& values) { return small_view(values).sample_range(0, 1); };
  layer.forward(part(x), part(y));
  CHECK_NOTHROW(layer.backward(part(x), part(x), part(dx)));
  CHECK_NOTHROW(layer.double_backward({.dx = part(x)}, part(x), part(x), {}, part(dx)));
}

TEST_CASE("gradients of residuals are the same where dx is not wanted") {
  run_ranks(2, [](thread_communicator const& comm) {
    std::vector<double> x(24), residual(24), dy(24), y(24), dx(24), with_dx(24), alone(24, -9);
    for (std::size_t i = 0; i < 24; ++i)
      x[i] = test::noise(1 + static_cast<std::uint64_t>(comm.rank()), i), residual[i] = test::noise(3, i),
      dy[i] = test::noise(4, i);
    auto const parts = [](auto& values) {
      using view = decltype(syncnorm::nchw(values.data(), 1, 2, 4));
      return std::array<view, 2>{syncnorm::nchw(values.data(), 1, 2, 4), syncnorm::nchw(values.data() + 8, 2, 2, 4)};
    };
    std::array<syncnorm::batch_norm_epilogue<double>, 2> with{};
    for (std::size_t k = 0; k < 2; ++k)
      with[k].activation = {0.25}, with[k].residual = parts(std::as_const(residual))[k];
    syncnorm::batch_norm<double, thread_communicator> layer{comm, 2};
    auto const xs = parts(std::as_const(x)), dys = parts(std::as_const(dy));
    layer.forward(xs, parts(y), with);
    layer.backward(xs, dys, parts(dx), with, parts(with_dx));
    layer.backward(xs, dys, {}, with, parts(alone));
    CHECK(with_dx == alone);
  });
}

TEST_CASE("polling finds the failure, and finish throws it") {
  syncnorm::thread_group const group{2, 300ms};
  std::jthread other{[&] { data_over_threads{group.communicator(1), 3, exchange_policy::gather}.step(); }};
  data_over_threads data{group.communicator(0), 3, exchange_policy::gather};
  data.step();
  other.join();
  auto const before = data.state();
  auto pending = data.layer.begin_forward(data.x(), data.y());
  while (!pending.ready()) std::this_thread::yield();
  auto moved = std::move(pending);
  auto assigned = data.layer.begin_forward(data.x(), data.y());
  assigned = std::move(moved);
  CHECK_THROWS_AS(assigned.finish(), syncnorm::timeout_error);
  CHECK(data.state() == before);
}

TEST_CASE("passes of which one is wrong leave nothing for backward passes") {
  using data_of_one = test::layer_data<float, syncnorm::self_communicator>;
  for (bool const frozen : {false, true}) {
    data_of_one good{{}, 3, exchange_policy::gather}, bad{{}, 3, exchange_policy::gather};
    good.step(), bad.step();
    good.layer.freeze_statistics(frozen);
    if (frozen) good.layer.forward(good.x(), good.y());
    auto null = bad.x();
    null.data = nullptr;
    auto const passes =
        syncnorm::passes(good.layer.plan_forward(good.x(), good.y()), bad.layer.plan_forward(null, bad.y()));
    CHECK_THROWS_AS(syncnorm::run_alone(passes), invalid);
    test::check_throws<invalid>([&] { good.layer.backward(good.x(), good.dy(), good.dx()); },
                                {"was there a forward pass?"});
  }
}

TEST_CASE("a copy of a layer knows what the ranks have agreed on") {
  run_ranks(2, [](thread_communicator const& comm) {
    int calls = 0;
    test::layer_data<float, contract::counted> data{contract::counted{comm, calls}, 200, exchange_policy::automatic};
    data.step();
    auto copy = data.layer;
    calls = 0;
    copy.forward(data.x(), data.y());
    CHECK(calls == 1);
  });
}

TEST_CASE("a reduced pass that an executor ends on one rank alone is known by the backward pass") {
  for (int failing = 1; failing < 9; ++failing) {
    std::array<std::string, 2> forward{}, backward{};
    run_ranks(
        2,
        [&](thread_communicator const& comm) {
          int uses = comm.rank() == 1 ? 0 : 1000;
          syncnorm::batch_norm<float, thread_communicator, test::failing_executor> layer{
              comm, 8, {.norm = {.exchange = exchange_policy::reduce}}, {&uses, failing}};
          std::vector<float> x(2 * 8 * 64), y(x.size());
          for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
          auto const view = [&](std::vector<float>& of) { return syncnorm::nchw(of.data(), 2, 8, 64); };
          auto const rank = static_cast<std::size_t>(comm.rank());
          forward[rank] = test_support::thrown([&] { layer.forward(view(x), view(y)); });
          uses = 1000;
          backward[rank] = test_support::thrown([&] { layer.backward(view(x), view(x), view(y)); });
        },
        5s);
    if (!forward[0].empty() || forward[1].empty()) continue;
    CHECK_MESSAGE(contains(backward[0], "rank 1: the saved statistics have 0 channels"), backward[0]);
    return;
  }
  FAIL("no rank failed alone");
}
