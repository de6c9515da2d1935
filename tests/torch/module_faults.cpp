#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>

using namespace test;
using syncnorm::invalid_argument_error;
using syncnorm::mismatch_error;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;

TEST_CASE("a fault of one rank is thrown on every rank, and changes nothing") {
  auto const good = random({3, 3, 2});
  struct fault {
    Tensor input;
    std::string text;
  };
  std::vector<fault> const faults{
      {Tensor{}, "undefined"},
      {random({3}), "dimensions"},
      {random({}), "dimensions"},
      {torch::ones({3, 3, 2}, torch::kInt), "Int"},
      {torch::ones({3, 3, 2}, torch::kHalf), "Half"},
      {good.to(torch::kFloat), "the input is of Float, but weight of Double"},
      {random({3, 4, 2}), "4 channels, expected 3"},
      {random({3, 200, 2}), "200 channels, expected 3"},
      {torch::empty({3, 3, 2}, at::device(torch::kMeta).dtype(torch::kDouble)), "on meta"},
      {good.to_sparse(), "Sparse"},
  };
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto const before = state_of(*norm);
    for (int round = 0; round < 2; ++round) { // before and after the first exchange that went well
      for (auto const& [input, expected] : faults) {
        auto const text = message_of<invalid_argument_error>([&] { norm->forward(comm.rank() == 1 ? input : good); });
        CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, expected)), text);
        if (round == 0) CHECK(same_state(before, state_of(*norm)));
      }
      norm->forward(good);
      CHECK(norm->num_batches_tracked.item<std::int64_t>() == round + 1);
    }
    for (bool const mean : {true, false}) {
      auto& lacking = mean ? norm->running_mean : norm->running_var;
      auto const kept = lacking;
      if (comm.rank() == 1) lacking = Tensor{};
      auto const text = message_of<invalid_argument_error>([&] { norm->forward(good); });
      CHECK_MESSAGE(contains(text, "rank 1: only one of running_mean and running_var is given"), text);
      lacking = kept;
    }
    for (bool const weight : {true, false}) {
      auto const& kept = weight ? norm->weight : norm->bias;
      auto const values = kept.data();
      if (comm.rank() == 1) kept.set_data(values.reshape({1, 3, 1}));
      auto const text = message_of<invalid_argument_error>([&] { norm->forward(good); });
      CHECK_MESSAGE(contains(text, weight ? "rank 1: weight has 3 dimensions, expected 1, [C]"
                                          : "rank 1: bias has 3 dimensions, expected 1, [C]"),
                    text);
      kept.set_data(values);
    }
    // A counter that is no number, as Module::to makes it one of floats.
    auto const counter = norm->num_batches_tracked.to(torch::kLong);
    norm->num_batches_tracked = counter.to(torch::kDouble);
    norm->forward(good);
    if (comm.rank() == 1) norm->num_batches_tracked.fill_(std::nan(""));
    auto const mean = norm->running_mean.clone();
    auto text = message_of<invalid_argument_error>([&] { norm->forward(good); });
    CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, "int64_t")), text);
    text = message_of<invalid_argument_error>([&] { (void)norm->begin_forward(good).finish(); });
    CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, "int64_t")), text);
    CHECK(torch::equal(norm->running_mean, mean));
    norm->num_batches_tracked = counter;
    // A cumulative average goes on from what the counter is when a pass begins, of whatever kind that is.
    norm->options.momentum(c10::nullopt);
    for (bool const two_phase : {true, false}) {
      auto const pass = [&] { two_phase ? (void)norm->begin_forward(good).finish() : (void)norm->forward(good); };
      auto const tracked = counter.clone();
      if (comm.rank() == 1) counter.fill_(-1);
      text = message_of<invalid_argument_error>(pass);
      CHECK_MESSAGE(contains(text, "rank 1: num_batches_tracked is -1, expected at least 0"), text);
      CHECK(torch::equal(norm->running_mean, mean));
      counter.copy_(tracked);
    }
    (void)norm->begin_forward(good).finish();
    CHECK(counter.item<std::int64_t>() == 3);
    CHECK(norm->running_mean.isfinite().all().item<bool>());
    // In evaluation there is nobody to tell.
    norm->eval();
    auto const here = message_of<invalid_argument_error>([&] { norm->forward(random({3})); });
    CHECK_MESSAGE(contains(here, "dimensions"), here);
  });
}

TEST_CASE("ranks that disagree all hear of it") {
  auto const same = BatchNormOptions{3};
  struct disagreement {
    BatchNormOptions other;
    std::string text;
  };
  std::vector<disagreement> const cases{
      {BatchNormOptions{3}.eps(1e-3), "eps"},
      {BatchNormOptions{3}.momentum(0.5), "momentum"},
      {BatchNormOptions{3}.momentum(c10::nullopt), "momentum"},
      {BatchNormOptions{3}.affine(false), "affine"},
      {BatchNormOptions{3}.track_running_stats(false), "running statistics"},
      {BatchNormOptions{4}, "channels"},
      {BatchNormOptions{300}, "channels"},
  };
  for (auto const& [other, expected] : cases)
    run_ranks(2, [&, theirs = other, part = expected](thread_communicator const& comm) {
      auto norm = make_norm(comm.rank() == 0 ? same : theirs, comm);
      auto const before = state_of(*norm);
      auto const x = random({4, norm->options.num_features()});
      auto const text = message_of<mismatch_error>([&] { norm->forward(x); });
      CHECK_MESSAGE(contains(text, part), text);
      CHECK(same_state(before, state_of(*norm)));
    });
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const type = comm.rank() == 0 ? torch::kDouble : torch::kFloat;
    auto norm = make_norm(same, comm, type);
    auto const text = message_of<mismatch_error>([&] { norm->forward(torch::ones({4, 3}, type)); });
    CHECK_MESSAGE(contains(text, "element type"), text);
  });
}

TEST_CASE("bad options and one value in all are errors on every rank") {
  for (auto const& options : {BatchNormOptions{3}.eps(-1), BatchNormOptions{3}.momentum(1.5),
                              BatchNormOptions{3}.eps(std::numeric_limits<double>::quiet_NaN())})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = make_norm(options, comm);
      auto const before = state_of(*norm);
      auto const text = message_of<invalid_argument_error>([&] { norm->forward(random({2, 3})); });
      CHECK_MESSAGE(contains(text, "expected a number"), text);
      CHECK(same_state(before, state_of(*norm)));
    });
  for (std::int64_t const samples : {0, 1})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = make_norm(BatchNormOptions{3}, comm);
      auto const before = state_of(*norm);
      auto const text = message_of<invalid_argument_error>([&] {
        norm->forward(random({comm.rank() == 0 ? samples : 1 - samples, 3}));
      });
      CHECK_MESSAGE(contains(text, "more than 1 value per channel"), text);
      CHECK(same_state(before, state_of(*norm)));
    });
  // In evaluation without running statistics it is this rank's values that are too few, whatever others have.
  auto lacking = make_norm(BatchNormOptions{3}.track_running_stats(false));
  lacking->eval();
  auto const few = message_of<invalid_argument_error>([&] { lacking->forward(random({1, 3})); });
  CHECK_MESSAGE(contains(few, "statistics of one rank need more than 1 value per channel"), few);
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm), same = make_norm(BatchNormOptions{3}, comm);
    norm->options.num_features(5); // which makes it no other module
    for (int step = 0; step < 2; ++step) {
      auto const x = random({4, 3, 2});
      auto const expected = same->forward(x);
      CHECK(torch::equal(step == 0 ? norm->begin_forward(x).finish() : norm->forward(x), expected));
      norm->set_communicator(comm);
    }
    CHECK(torch::equal(norm->running_var, same->running_var));
  });
  auto const null = message_of<invalid_argument_error>([] {
    SyncBatchNorm norm{BatchNormOptions{-2}};
    norm->forward(torch::ones({2, 3}));
  });
  CHECK_MESSAGE(contains(null, "negative"), null);
}
