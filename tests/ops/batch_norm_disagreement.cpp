#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>
#include <syncnorm/ops/passes.hpp>

#include <ops/batch_norm_steps.hpp>
#include <support/throws.hpp>

using test::layer_of_floats;
using test::step_inputs;

TEST_CASE("ranks that disagree on the number of channels are told so") {
  for (auto const& pair : {std::pair<std::int64_t, std::int64_t>{3, 4}, {200, 3}, {300, 200}, {128, 129}})
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      auto const channels = comm.rank() == 1 ? pair.second : pair.first;
      step_inputs in{channels};
      std::vector<std::string> const parts{"number of channels", "rank 0 has " + std::to_string(pair.first),
                                           "rank 1 has " + std::to_string(pair.second)};
      layer_of_floats layer{comm, channels};
      test::check_throws<syncnorm::mismatch_error>([&] { layer.forward(in.x_view, in.y_view); }, parts);
      test::check_throws<syncnorm::mismatch_error>(
          [&] { (void)syncnorm::batch_norm_forward(syncnorm::host::serial_executor{}, comm, in.x_view, in.y_view); },
          parts);
      CHECK(layer.num_batches_tracked() == 0);
    });
}

TEST_CASE("ranks that disagree on the element type are told so") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    auto const forward = [&]<class T>(T) {
      std::vector<T> x{1, 2, 3, 4}, y(4);
      (void)syncnorm::batch_norm_forward(syncnorm::host::serial_executor{}, comm, syncnorm::nc(x.data(), 2, 2),
                                         syncnorm::nc(y.data(), 2, 2));
    };
    test::check_throws<syncnorm::mismatch_error>([&] { comm.rank() == 0 ? forward(float{}) : forward(double{}); },
                                                 {"element type", "rank 0 has float", "rank 1 has double"});
  });
}

TEST_CASE("ranks that disagree on the options are told so") {
  struct other_options {
    syncnorm::batch_norm_layer_options layer;
    char const* part;
  };
  for (auto const& other : std::initializer_list<other_options>{
           {{.norm = {.eps = 1e-3}}, "eps"},
           {{.norm = {.momentum = 0.2}}, "momentum"},
           {{.norm = {.momentum = std::nullopt}}, "momentum"},
           {{.norm = {.variance = syncnorm::running_variance::biased}}, "running variance"},
           {{.norm = {.variance = syncnorm::running_variance::standard_deviation}}, "standard deviation"},
           {{.norm = {.exchange = syncnorm::exchange_policy::gather}}, "exchange policy asked for"},
           {{.norm = {.normalize_by = syncnorm::batch_variance::unbiased}}, "variance that normalizes"},
           {{.track_running_stats = false}, "running statistics"},
           {{.affine = false}, "affine"}})
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      layer_of_floats layer{comm, 3, comm.rank() == 2 ? other.layer : syncnorm::batch_norm_layer_options{}};
      step_inputs in{3};
      test::check_throws<syncnorm::mismatch_error>([&] { layer.forward(in.x_view, in.y_view); },
                                                   {"disagree", "rank 2", "rank 0", other.part});
      CHECK(layer.num_batches_tracked() == 0);
    });
}

TEST_CASE("ranks whose cumulative averages have different numbers of batches are told so") {
  for (auto const& momentum : {std::optional<double>{}, std::optional{0.1}})
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      layer_of_floats layer{comm, 3, {.norm = {.momentum = momentum}}};
      step_inputs in{3};
      layer.forward(in.x_view, in.y_view);
      layer.forward(in.x_view, in.y_view);
      if (comm.rank() == 1) layer.num_batches_tracked() = 7;
      std::vector const mean(layer.running_mean().begin(), layer.running_mean().end());
      auto const forward = [&] { layer.forward(in.x_view, in.y_view); };
      if (momentum) {
        forward(); // of which the counter takes no part
        CHECK(layer.num_batches_tracked() == (comm.rank() == 1 ? 8 : 3));
        return;
      }
      test::check_throws<syncnorm::mismatch_error>(
          forward, {"momentum (-1 - n: the cumulative average of n batches)", "rank 0 has -3", "rank 1 has -8"});
      CHECK(layer.num_batches_tracked() == (comm.rank() == 1 ? 7 : 2));
      CHECK(std::ranges::equal(layer.running_mean(), mean));
      layer.num_batches_tracked() = 7;
      forward();
      CHECK(layer.num_batches_tracked() == 8);
    });
}

TEST_CASE("ranks in different passes are told so") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    layer_of_floats layer{comm, 3};
    step_inputs in{3};
    layer.forward(in.x_view, in.y_view);
    test::check_throws<syncnorm::mismatch_error>(
        [&] {
          if (comm.rank() == 0)
            layer.forward(in.x_view, in.y_view);
          else
            layer.backward(in.x_view, in.dy_view, in.dx_view);
        },
        {"the operation", "batch_norm forward", "batch_norm backward"});
  });
}

TEST_CASE("a pass by itself and one of a group are told apart, and then go on") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      layer_of_floats layer{comm, 3, {.norm = {.exchange = policy}}};
      step_inputs in{3};
      syncnorm::batch_norm_group group{comm};
      auto const by_itself = [&] { layer.begin_forward(in.x_view, in.y_view).finish(); };
      auto const grouped = [&] { group.run(syncnorm::passes(layer.plan_forward(in.x_view, in.y_view))); };
      for (int round = 0; round < 2; ++round) { // before and after the first exchanges that went well
        test::check_throws<syncnorm::mismatch_error>([&] { comm.rank() == 0 ? grouped() : by_itself(); },
                                                     {"in two (1), in a group (2)", "rank 0 has 2", "rank 1 has 1"});
        CHECK(layer.num_batches_tracked() == 3 * round);
        layer.forward(in.x_view, in.y_view);
        by_itself();
        grouped();
      }
      CHECK(layer.num_batches_tracked() == 6);
    });
}

TEST_CASE("what is wrong on one rank is said of the pass that this rank runs") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    layer_of_floats layer{comm, 3};
    step_inputs in{3};
    test::check_throws<syncnorm::invalid_argument_error>(
        [&] {
          if (comm.rank() == 0)
            layer.forward(in.x_view, in.y_view);
          else
            layer.backward(in.x_view, in.dy_view, in.dx_view);
        },
        {"batch_norm backward: rank 1", "was there a forward pass?"});
  });
}

TEST_CASE("a rank without a forward pass is an error on every rank, without a workspace, too") {
  for (std::int64_t const channels : {3, 200})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      step_inputs const good{channels};
      syncnorm::tensor_view<float const> const x = good.x_view;
      auto const saved = syncnorm::batch_norm_forward<float>(syncnorm::host::serial_executor{}, comm, x, good.y_view);
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] {
            syncnorm::batch_norm_backward<float const>(syncnorm::host::serial_executor{}, comm, good.dy_view, x,
                                                       good.dx_view, {},
                                                       comm.rank() == 1 ? syncnorm::batch_norm_saved{} : saved);
          },
          {"batch_norm backward", "rank 1", "was there a forward pass?"});
    });
}

TEST_CASE("a backward pass of another batch than the forward pass had on one rank is an error on every rank") {
  for (std::int64_t const channels : {3, 200})
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      layer_of_floats layer{comm, channels};
      step_inputs in{channels};
      layer.forward(in.x_view, in.y_view);
      auto const part = [&](auto const& view) { return comm.rank() == 1 ? view.sample_range(0, 2) : view; };
      std::string const what = "x has 10 values per channel, in the forward pass 20";
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] { layer.backward(part(in.x_view), part(in.dy_view), part(in.dx_view)); },
          {"batch_norm backward: rank 1: ", what});
      CHECK(std::ranges::all_of(layer.beta_grad(), [](float sum) { return sum == 0; }));
      layer.backward(in.x_view, in.dy_view, in.dx_view);
      test::check_throws<syncnorm::invalid_argument_error>(
          [&] {
            layer.double_backward({.dx = part(in.dy_view)}, part(in.x_view), part(in.dy_view), part(in.y_view),
                                  part(in.dx_view));
          },
          {"2nd backward: rank 1: ", what});
    });
}
