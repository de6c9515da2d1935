#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/checked.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>

#include <comm/bare.hpp>
#include <comm/counted.hpp>
#include <ops/pending_cases.hpp>
#include <support/failing_executor.hpp>
#include <support/message_of.hpp>
#include <support/sanitized.hpp>

using syncnorm::exchange_policy;
using syncnorm::thread_communicator;
using test::layer_data;
using test_support::contains, test_support::message_of;

TEST_CASE("two phases and groups of layers are the passes one after the other") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (int const ranks : {1, 2, 3}) {
      if (test::sanitized && ranks == 2) continue;
      syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
        for (auto const& failure : test::check_two_phases(comm, policy)) FAIL_CHECK(failure);
        for (auto const& failure : test::check_groups(comm, policy)) FAIL_CHECK(failure);
      });
      syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
        contract::bare const blocking{comm}; // no asynchronous collectives
        for (auto const& failure : test::check_two_phases(blocking, policy)) FAIL_CHECK(failure);
        for (auto const& failure : test::check_groups(blocking, policy)) FAIL_CHECK(failure);
      });
      syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
        // Ranks that got out of step would be told so.
        syncnorm::any_communicator const checked{syncnorm::checked_communicator{comm}};
        for (auto const& failure : test::check_two_phases(checked, policy)) FAIL_CHECK(failure);
        for (auto const& failure : test::check_groups(checked, policy)) FAIL_CHECK(failure);
      });
    }
}

TEST_CASE("passes may be finished in another order on each rank, or not at all") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (std::int64_t const channels : {3, 200})
      syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
        for (auto const& failure : test::check_abandoned(comm, channels, policy)) FAIL_CHECK(failure);
      });
}

TEST_CASE("to begin waits for nobody") {
  std::atomic<int> begun{0};
  auto const timeout = std::chrono::seconds{30};
  syncnorm::run_ranks(
      2,
      [&](thread_communicator const& comm) {
        layer_data<float, thread_communicator> a{comm, 200, exchange_policy::gather},
            b{comm, 200, exchange_policy::gather};
        a.layer.forward(a.x(), a.y()); // by now the ranks have agreed on the channels
        auto const wait_for = [&](int count) {
          auto const deadline = std::chrono::steady_clock::now() + timeout;
          while (begun < count && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
          CHECK(begun >= count);
        };
        if (comm.rank() == 1) wait_for(2); // begins when rank 0 has begun both
        auto forward = a.layer.begin_forward(a.x(), a.y());
        if (comm.rank() == 0) CHECK_FALSE(forward.ready());
        ++begun;
        auto again = a.layer.begin_forward(a.x(), a.y());
        ++begun;
        again.finish();
        CHECK(forward.ready());
        forward.finish();
        CHECK(a.layer.num_batches_tracked() == 3);
      },
      timeout);
}

TEST_CASE("what is wrong on one rank is thrown by finish on every rank, and nothing has changed") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (bool const first_good : {true, false})
      for (std::int64_t const channels : {3, 200})
        syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
          layer_data<float, thread_communicator> data{comm, channels, policy};
          if (first_good) data.step();
          auto const before = data.state();
          auto x = data.x();
          if (comm.rank() == 1) x.data = nullptr;
          auto pending = data.layer.begin_forward(x, data.y());
          auto text = message_of<syncnorm::invalid_argument_error>([&] { pending.finish(); });
          CHECK_MESSAGE((contains(text, "rank 1: x is null") && !contains(text, "rank 0")), text);
          CHECK(data.state() == before);
          data.step();
          auto const after = data.state();
          auto dy = data.dy();
          if (comm.rank() == 2) dy.samples = 1;
          auto backward = data.layer.begin_backward(data.x(), dy, data.dx());
          text = message_of<syncnorm::invalid_argument_error>([&] { backward.finish(); });
          CHECK_MESSAGE(contains(text, "rank 2: dy is [1, "), text);
          CHECK(data.state() == after);
          CHECK(contains(message_of<syncnorm::invalid_argument_error>([&] { backward.finish(); }), "finished already"));
          data.step();
        });
}

TEST_CASE("a pass in two phases on one rank and in one on another is an error on both") {
  for (std::int64_t const channels : {3, 200})
    for (bool const first_good : {false, true})
      syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
        layer_data<float, thread_communicator> data{comm, channels, exchange_policy::gather};
        if (first_good) data.step();
        auto const before = data.state();
        auto const text = message_of<syncnorm::mismatch_error>([&] {
          if (comm.rank() == 0)
            data.layer.begin_forward(data.x(), data.y()).finish();
          else
            data.layer.forward(data.x(), data.y());
        });
        CHECK_MESSAGE(contains(text, "whether a pass is in one phase (0), in two (1)"), text);
        CHECK(data.state() == before);
        data.step();
      });
}

TEST_CASE("a pass may be dropped as late as static objects are") {
  static layer_data<float, syncnorm::self_communicator> data{{}, 3, exchange_policy::gather};
  static std::vector<std::uint8_t> const mask(1000, 1);
  static std::optional<syncnorm::pending_passes> dropped;
  auto const x = data.x();
  dropped.emplace(data.layer.begin_forward(
      x, data.y(),
      {.activation = syncnorm::activation::relu(), .mask = syncnorm::mask_of(mask.data(), x.samples, x.spatial)}));
  CHECK(dropped->ready());
}

TEST_CASE("ranks that disagree, in a layer of a group, all hear of it") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (bool const first_good : {true, false})
      syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
        using data_type = layer_data<float, thread_communicator>;
        data_type a{comm, 3, policy}, b{comm, 70, policy}, other{comm, 70, policy, 0.25}, wide{comm, 71, policy};
        syncnorm::batch_norm_group group{comm};
        auto const run = [&](data_type& second) {
          group.run(
              syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), second.layer.plan_forward(second.x(), second.y())));
        };
        if (first_good) run(b);
        auto const before = a.state();
        auto text = message_of<syncnorm::mismatch_error>([&] { run(comm.rank() == 1 ? other : b); });
        CHECK_MESSAGE((contains(text, "of layer 1") && contains(text, "momentum") && contains(text, "rank 1 has 0.25")),
                      text);
        auto x = a.x();
        if (comm.rank() == 0) x.samples = -3;
        text = message_of<syncnorm::invalid_argument_error>(
            [&] { group.run(syncnorm::passes(a.layer.plan_forward(x, a.y()), b.layer.plan_forward(b.x(), b.y()))); });
        CHECK_MESSAGE((contains(text, "of layer 0: rank 0: x has a negative extent")), text);
        CHECK(a.state() == before);
        text = message_of<syncnorm::invalid_argument_error>([&] {
          group.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), b.layer.plan_backward(b.x(), b.dy(), b.dx())));
        });
        CHECK_MESSAGE(contains(text, "cannot travel together"), text);
        CHECK(a.state() == before);
        // Other channels than the group has seen: ranks that had agreed on these would send what others do not expect.
        syncnorm::batch_norm_group fresh{comm};
        text = message_of<syncnorm::mismatch_error>([&] {
          auto& second = comm.rank() == 1 ? wide : b;
          fresh.run(
              syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), second.layer.plan_forward(second.x(), second.y())));
        });
        CHECK_MESSAGE(contains(text, "channels"), text);
        text = message_of<syncnorm::mismatch_error>([&] {
          if (comm.rank() == 1)
            fresh.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y())));
          else
            fresh.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), b.layer.plan_forward(b.x(), b.y())));
        });
        CHECK_MESSAGE(contains(text, "number of layers"), text);
        CHECK(a.state() == before);
        run(b);
      });
}

TEST_CASE("a negative number of channels in a new group is not taken for one that ranks differ in") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    syncnorm::batch_norm_group group{comm};
    test::layer_data<float, thread_communicator> a{comm, 3, exchange_policy::gather},
        b{comm, 2, exchange_policy::gather};
    syncnorm::batch_norm<float, thread_communicator> negative{comm, comm.rank() == 0 ? -5 : 2};
    auto const text = test_support::thrown(
        [&] { group.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), negative.plan_forward(b.x(), b.y()))); });
    CHECK_MESSAGE(contains(text, "rank 0: layer 1: the number of channels is negative: -5"), text);
  });
}

TEST_CASE("faults of several layers of a new group are told with their layers") {
  syncnorm::run_ranks(3, [](thread_communicator const& comm) {
    syncnorm::batch_norm_group group{comm};
    layer_data<float, thread_communicator> a{comm, 3, exchange_policy::gather}, b{comm, 2, exchange_policy::gather};
    for (int attempt = 0; attempt < 2; ++attempt) {
      auto x = a.x(), u = b.x();
      if (comm.rank() == 1) x.data = nullptr;
      if (comm.rank() == 2 && attempt == 0) u.data = nullptr;
      auto const text = test_support::thrown(
          [&] { group.run(syncnorm::passes(a.layer.plan_forward(x, a.y()), b.layer.plan_forward(u, b.y()))); });
      CHECK_MESSAGE(contains(text, "batch_norm forward of layer 0: rank 1: x is null"), text);
    }
  });
}

TEST_CASE("one value per channel over all ranks, in one layer of a group, changes none") {
  syncnorm::run_ranks(2, [](thread_communicator const& comm) {
    layer_data<float, thread_communicator> good{comm, 3, exchange_policy::gather},
        bad{comm, 4, exchange_policy::gather};
    syncnorm::batch_norm_group group{comm};
    auto const before = good.state();
    auto const one = [&](auto view) {
      view.samples = comm.rank();
      view.spatial = 1;
      return view;
    };
    auto const text = message_of<syncnorm::invalid_argument_error>([&] {
      group.run(syncnorm::passes(good.layer.plan_forward(good.x(), good.y()),
                                 bad.layer.plan_forward(one(bad.x()), one(bad.y()))));
    });
    CHECK_MESSAGE(contains(text, "more than 1 value per channel"), text);
    CHECK(good.state() == before);
  });
}

TEST_CASE("a group of layers is one collective after the first, whatever their channels") {
  syncnorm::run_ranks(3, [](thread_communicator const& comm) {
    int calls = 0;
    contract::counted const counting{comm, calls};
    using data_type = layer_data<float, contract::counted>;
    data_type a{counting, 5, exchange_policy::automatic}, b{counting, 700, exchange_policy::automatic},
        c{counting, 64, exchange_policy::automatic};
    syncnorm::batch_norm_group group{counting};
    std::vector<int> counts;
    for (int step = 0; step < 2; ++step) {
      calls = 0;
      group.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), b.layer.plan_forward(b.x(), b.y()),
                                 c.layer.plan_forward(c.x(), c.y())));
      counts.push_back(std::exchange(calls, 0));
      group.run(syncnorm::passes(c.layer.plan_backward(c.x(), c.dy(), c.dx())));
      counts.push_back(std::exchange(calls, 0));
    }
    CHECK(counts == std::vector{2, 1, 1, 1}); // the first of three layers does not fit into the head
  });
}

TEST_CASE("local passes may be among those of a group") {
  syncnorm::run_ranks(2, [](thread_communicator const& comm) {
    using data_type = layer_data<double, thread_communicator>;
    data_type frozen{comm, 3, exchange_policy::gather}, trained{comm, 4, exchange_policy::gather};
    data_type alone{comm, 4, exchange_policy::gather};
    frozen.layer.freeze_statistics();
    syncnorm::batch_norm_group group{comm};
    group.run(syncnorm::passes(frozen.layer.plan_forward(frozen.x(), frozen.y()),
                               trained.layer.plan_forward(trained.x(), trained.y())));
    alone.layer.forward(alone.x(), alone.y());
    CHECK(trained.outputs == alone.outputs);
    CHECK(frozen.layer.num_batches_tracked() == 0);
    group.run(syncnorm::passes(frozen.layer.plan_backward(frozen.x(), frozen.dy(), frozen.dx()),
                               trained.layer.plan_backward(trained.x(), trained.dy(), trained.dx())));
    alone.layer.backward(alone.x(), alone.dy(), alone.dx());
    CHECK(trained.gradients == alone.gradients);
    auto const of_frozen = frozen.gradients;
    frozen.layer.zero_grad();
    frozen.layer.backward(frozen.x(), frozen.dy(), frozen.dx());
    CHECK(frozen.gradients == of_frozen);
    // All of them local: no exchange, so rank 1 need not come.
    trained.layer.eval();
    if (comm.rank() == 0)
      group.run(syncnorm::passes(frozen.layer.plan_forward(frozen.x(), frozen.y()),
                                 trained.layer.plan_forward(trained.x(), trained.y())));
  });
}

TEST_CASE("ranks that disagree on whether a layer of a group is of one rank alone are told so") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (bool const forward : {true, false})
      syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
        using data_type = layer_data<float, thread_communicator>;
        data_type a{comm, 3, policy}, b{comm, 3, policy};
        syncnorm::batch_norm<float, thread_communicator> by_batch{
            comm, 3, {.norm = {.exchange = policy}, .track_running_stats = false}};
        bool const alone = comm.rank() == 1;
        if (alone) by_batch.eval();
        a.step(), b.step();
        auto const before = a.state(), before_b = b.state();
        syncnorm::batch_norm_group group{comm};
        auto const text = message_of<syncnorm::mismatch_error>([&] {
          if (forward)
            group.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), by_batch.plan_forward(b.x(), b.y())));
          else
            group.run(syncnorm::passes(a.layer.plan_backward(a.x(), a.dy(), a.dx()),
                                       b.layer.plan_backward(b.x(), b.dy(), b.dx(), {}, {}, {.exchange = !alone})));
        });
        CHECK_MESSAGE(contains(text, "of this rank alone (3): rank 0 has 2, rank 1 has 3"), text);
        CHECK(a.state() == before);
        CHECK(b.state() == before_b);
        a.step(), b.step();
      });
}

TEST_CASE("forward passes of one layer do not share a group, nor come between the phases of its backward pass") {
  auto const check = [](thread_communicator const& comm) {
    layer_data<float, thread_communicator> data{comm, 3, exchange_policy::gather};
    syncnorm::batch_norm_group group{comm};
    data.step();
    auto const before = data.state();
    auto text = message_of<syncnorm::invalid_argument_error>([&] {
      group.run(
          syncnorm::passes(data.layer.plan_forward(data.x(), data.y()), data.layer.plan_forward(data.dy(), data.dx())));
    });
    CHECK_MESSAGE(contains(text, "two forward passes of one group are of the same layer"), text);
    CHECK(data.state() == before);

    data.layer.forward(data.x(), data.y());
    auto const trained = data.state();
    auto backward = data.layer.begin_backward(data.x(), data.dy(), data.dx());
    data.layer.eval();
    data.layer.forward(data.dy(), data.y());
    text = message_of<syncnorm::invalid_argument_error>([&] { backward.finish(); });
    CHECK_MESSAGE(contains(text, "another forward pass since this one began"), text);
    CHECK(data.state() == trained);
    data.layer.train();
    data.step();
  };
  for (int const ranks : {1, 2}) syncnorm::run_ranks(ranks, check);
}

TEST_CASE("a peer that fails in between is an error, at finish and at its end") {
  syncnorm::thread_group const group{2, std::chrono::milliseconds{200}};
  layer_data<float, thread_communicator> data{group.communicator(0), 3, exchange_policy::gather};
  auto const before = data.state();
  {
    auto pending = data.layer.begin_forward(data.x(), data.y()); // the agreement on channels waits for rank 1 in vain
    CHECK_THROWS_AS(pending.finish(), syncnorm::timeout_error);
  }
  auto abandoned = data.layer.begin_forward(data.x(), data.y());
  CHECK(data.state() == before);
}

TEST_CASE("local passes of a group that are finished or dropped in any order leave the ranks in step") {
  for (bool const drops : {false, true})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      layer_data<float, thread_communicator> frozen{comm, 3, exchange_policy::gather},
          trained{comm, 3, exchange_policy::gather};
      frozen.layer.freeze_statistics();
      syncnorm::batch_norm_group group{comm};
      {
        auto local = group.begin(syncnorm::passes(frozen.layer.plan_forward(frozen.x(), frozen.y())));
        auto exchanged = group.begin(syncnorm::passes(trained.layer.plan_forward(trained.x(), trained.y())));
        bool const other_way = comm.rank() == 1;
        if (!other_way) local.finish();
        exchanged.finish();
        if (other_way && !drops) local.finish();
      }
      auto const before = trained.layer.num_batches_tracked();
      for (int i = 0; i < 2; ++i) group.run(syncnorm::passes(trained.layer.plan_forward(trained.x(), trained.y())));
      CHECK(trained.layer.num_batches_tracked() == before + 2);
    });
}

TEST_CASE("an executor that throws in a local pass of a group leaves all its layers as they were") {
  int uses = 0, none = 0;
  syncnorm::self_communicator const comm;
  using layer_type = syncnorm::batch_norm<float, syncnorm::self_communicator, test::failing_executor>;
  layer_type sound{comm, 3, {}, {&none, 0}}, failing{comm, 3, {}, {&uses, 2}};
  std::vector<float> x{1, 5, 2, 3, 4, 9}, y(6), dx(6), other_dx(6);
  auto const view = [](std::vector<float>& of) { return syncnorm::nchw(of.data(), 2, 3, 1); };
  for (auto* const layer : {&sound, &failing}) {
    layer->freeze_statistics();
    layer->forward(view(x), view(y));
  }
  syncnorm::batch_norm_group group{comm};
  CHECK(uses == 1);
  CHECK_THROWS_AS(group.run(syncnorm::passes(sound.plan_backward(view(x), view(x), view(dx)),
                                             failing.plan_backward(view(x), view(x), view(other_dx)))),
                  std::runtime_error);
  CHECK(std::ranges::equal(sound.beta_grad(), std::array{0.0F, 0.0F, 0.0F}));
  CHECK(std::ranges::equal(failing.beta_grad(), std::array{0.0F, 0.0F, 0.0F}));
  group.run(syncnorm::passes(sound.plan_backward(view(x), view(x), view(dx)),
                             failing.plan_backward(view(x), view(x), view(other_dx))));
  CHECK(std::ranges::equal(sound.beta_grad(), std::array{4.0F, 9.0F, 11.0F}));
  CHECK(other_dx == dx);
}

TEST_CASE("what is wrong with a local pass of a group leaves all its layers as they were") {
  syncnorm::run_ranks(2, [](thread_communicator const& comm) {
    using data_type = layer_data<double, thread_communicator>;
    data_type trained{comm, 3, exchange_policy::gather}, frozen{comm, 4, exchange_policy::gather};
    syncnorm::batch_norm<double, thread_communicator> by_itself{comm, 2, {.track_running_stats = false}};
    by_itself.eval();
    frozen.layer.freeze_statistics();
    syncnorm::batch_norm_group group{comm};
    auto const before = trained.state();
    std::array<double, 4> few{1, 2, 3, 4}, out{};
    std::int64_t const samples = comm.rank() == 1 ? 1 : 2; // one value has no variance
    auto const plan = [&](auto& values) { return syncnorm::nchw(values.data(), samples, 2, 1); };
    std::string thrown;
    try {
      group.run(syncnorm::passes(trained.layer.plan_forward(trained.x(), trained.y()),
                                 by_itself.plan_forward(plan(few), plan(out))));
    } catch (syncnorm::invalid_argument_error const& e) {
      thrown = e.what();
    }
    CHECK_MESSAGE(thrown.find("rank 1: statistics of one rank need more than 1 value per channel") != std::string::npos,
                  thrown);
    CHECK(trained.state() == before);
    // All of them local: thrown where it is wrong.
    frozen.layer.forward(frozen.x(), frozen.y());
    trained.layer.freeze_statistics();
    trained.layer.forward(trained.x(), trained.y());
    auto const kept = trained.state();
    auto const local = [&] {
      auto dy = frozen.dy();
      if (comm.rank() == 1) dy.data = nullptr;
      group.run(syncnorm::passes(trained.layer.plan_backward(trained.x(), trained.dy(), trained.dx()),
                                 frozen.layer.plan_backward(frozen.x(), dy, frozen.dx())));
    };
    if (comm.rank() == 1) {
      CHECK_THROWS_AS(local(), syncnorm::invalid_argument_error);
      CHECK(trained.state() == kept);
    } else {
      local();
    }
  });
}
