#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <ops/power_norm_steps.hpp>
#include <support/throws.hpp>

using test::step_inputs;
using test::watched_layer;

TEST_CASE("a number of steps that is none on one rank is an error in the same call on every rank") {
  for (std::int64_t const warmup : {0, 100})
    syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
      syncnorm::power_norm<float, syncnorm::thread_communicator> layer{comm, 4, {.norm = {.warmup_iters = warmup}}};
      step_inputs in{4};
      auto const forward = [&] { layer.forward(in.x_view, in.y_view); };
      auto const backward = [&] { layer.backward(in.x_view, in.dy_view, in.dx_view); };
      forward(), backward();
      layer.synchronize();
      for (std::int64_t const bad : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
        if (comm.rank() == 1) layer.iters() = bad;
        auto const check = [&](auto const& call) {
          test::check_throws<syncnorm::invalid_argument_error>(
              call, {"power_norm forward: rank 1: iters is " + std::to_string(bad)});
        };
        if (warmup != 0) {
          check(forward);
        } else {
          forward();
          check(backward);
        }
      }
      if (comm.rank() == 1) layer.iters() = 1;
      forward(), backward();
      CHECK(layer.iters() == 2);
    });
}

TEST_CASE("ranks that disagree on the number of channels, the element type, or the options are told so") {
  for (auto const& pair : {std::pair<std::int64_t, std::int64_t>{3, 4}, {200, 3}, {300, 200}, {128, 129}})
    syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
      auto const channels = comm.rank() == 1 ? pair.second : pair.first;
      watched_layer watched{comm, channels};
      step_inputs in{channels};
      test::check_throws<syncnorm::mismatch_error>([&] { in.forward(watched.layer); },
                                                   {"number of channels", "rank 0 has " + std::to_string(pair.first),
                                                    "rank 1 has " + std::to_string(pair.second)});
      CHECK(watched.layer.iters() == 0);
    });
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    auto const forward = [&]<class T>(T) {
      std::vector<T> x{1, 2, 3, 4}, y(4);
      syncnorm::power_norm<T, syncnorm::thread_communicator> layer{comm, 2};
      layer.forward(syncnorm::nc(x.data(), 2, 2), syncnorm::nc(y.data(), 2, 2));
    };
    test::check_throws<syncnorm::mismatch_error>([&] { comm.rank() == 0 ? forward(float{}) : forward(double{}); },
                                                 {"element type", "rank 0 has float", "rank 1 has double"});
  });
  struct other_options {
    syncnorm::power_norm_layer_options layer;
    char const* part;
  };
  for (auto const& other : std::initializer_list<other_options>{
           {{.norm = {.eps = 1e-3}}, "eps"},
           {{.norm = {.alpha_forward = 0.5}}, "alpha_forward"},
           {{.norm = {.alpha_backward = 0.5}}, "alpha_backward"},
           {{.norm = {.warmup_iters = 7}}, "warmup_iters"},
           {{.norm = {.warmup_iters = 0}}, "warmup_iters"},
           {{.norm = {.groups = 2}}, "groups"},
           {{.norm = {.group_eps = 1}}, "group_eps"},
           {{.norm = {.recursion = syncnorm::power_norm_recursion::corrected}}, "corrected"},
           {{.affine = false}, "affine"}})
    syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
      test::power_layer layer{comm, 4, comm.rank() == 2 ? other.layer : syncnorm::power_norm_layer_options{}};
      step_inputs in{4};
      test::check_throws<syncnorm::mismatch_error>([&] { in.forward(layer); },
                                                   {"disagree", "rank 2", "rank 0", other.part});
      CHECK(layer.iters() == 0);
    });
}

TEST_CASE("ranks in different steps or passes are told so, in the warm-up and after it") {
  for (std::int64_t const other_step : {2, 60}) // with rank 0 in the warm-up: beside it, and behind it
    syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
      watched_layer watched{comm, 4, {.warmup_iters = 50}};
      step_inputs in{4};
      in.forward(watched.layer), in.backward(watched.layer);
      if (comm.rank() == 1) watched.layer.iters() = other_step;
      auto const before = watched.state();
      auto const step = [&] {
        in.forward(watched.layer);
        in.backward(watched.layer);
      };
      test::check_throws<syncnorm::mismatch_error>(
          step, {"the step", "rank 0 has 2", "rank 1 has " + std::to_string(other_step + 1)});
      CHECK(watched.state() == before);
      watched.layer.iters() = 60;
      step();
      watched.layer.synchronize();
      CHECK(watched.layer.iters() == 61);
    });
  for (std::int64_t const warmup : {0, 100})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      watched_layer watched{comm, 4, {.warmup_iters = warmup}};
      step_inputs in{4};
      in.forward(watched.layer), in.backward(watched.layer);
      in.forward(watched.layer);
      watched.layer.synchronize();
      test::check_throws<syncnorm::mismatch_error>(
          [&] {
            comm.rank() == 0 ? in.forward(watched.layer) : in.backward(watched.layer);
            watched.layer.synchronize();
          },
          {"the operation", "power_norm forward", "power_norm backward"});
      CHECK(watched.layer.iters() == 2);
      // What failed on the one rank, and not on the other, is told to both.
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] {
            in.backward(watched.layer);
            watched.layer.synchronize();
          },
          {"power_norm backward: rank 0: the forward pass failed: power_norm", "disagree on the operation"});
      in.forward(watched.layer), in.backward(watched.layer);
      watched.layer.synchronize();
      CHECK(watched.layer.iters() == 3);
    });
}

TEST_CASE("ranks on either side of the end of the warm-up are told so in the same call") {
  // So that another layer's passes are not taken for this one's.
  for (std::int64_t const set : {1, 70})
    syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
      watched_layer watched{comm, 4, {.warmup_iters = 50}}, other{comm, 4, {.warmup_iters = 50}};
      step_inputs in{4};
      watched.layer.iters() = other.layer.iters() = set == 1 ? 60 : 5;
      for (auto* const each : {&watched, &other}) in.forward(each->layer), in.backward(each->layer);
      watched.layer.synchronize(), other.layer.synchronize();
      auto const before = watched.state();
      std::int64_t const steps = watched.layer.iters();
      if (comm.rank() == 1) watched.layer.iters() = set;
      auto const forward = [&] { in.forward(watched.layer); };
      auto const check = [&](auto const& call) {
        test::check_throws<syncnorm::mismatch_error>(call, {"the step", "rank 1 has " + std::to_string(set + 1)});
      };
      if (set == 1)
        forward();
      else
        check(forward);
      in.forward(other.layer), in.backward(other.layer), other.layer.synchronize();
      if (set == 1) check([&] { watched.layer.synchronize(); });
      watched.layer.iters() = steps;
      CHECK(watched.state() == before);
      in.forward(watched.layer), in.backward(watched.layer), watched.layer.synchronize();
      CHECK(watched.layer.iters() == steps + 1);
    });
  // What all set is no disagreement, whichever side it is on.
  syncnorm::run_ranks(test::step_ranks, [&](syncnorm::thread_communicator const& comm) {
    watched_layer watched{comm, 4, {.warmup_iters = 50}};
    step_inputs in{4};
    for (std::int64_t const set : {60, 2, 49, 0, 80}) {
      watched.layer.synchronize();
      watched.layer.iters() = set;
      in.forward(watched.layer), in.backward(watched.layer), watched.layer.synchronize();
      CHECK(watched.layer.iters() == set + 1);
    }
  });
}

TEST_CASE("a rank in a batch norm and one in a power norm are told so, whose messages are of one size") {
  constexpr std::int64_t channels = 6; // 256 + 2·8·6 = 304 + 8·6
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    watched_layer watched{comm, channels, {.recursion = syncnorm::power_norm_recursion::corrected}};
    syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, channels};
    step_inputs in{channels};
    in.forward(watched.layer), layer.forward(in.x_view, in.y_view);
    watched.layer.synchronize();
    test::check_throws<syncnorm::mismatch_error>(
        [&] {
          comm.rank() == 0 ? layer.forward(in.x_view, in.y_view)
                           : (in.forward(watched.layer), watched.layer.synchronize());
        },
        {"the operation", "rank 0 has batch_norm forward", "rank 1 has power_norm forward"});
  });
}
