#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <gloo/allgather.h>
#include <malloc.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include "comm/contract.hpp"
#include "support/exchange_costs.hpp"
#include "support/message_of.hpp"
#include "support/processes.hpp"

using namespace std::chrono_literals;
using syncnorm::gloo_communicator;
using test_support::contains, test_support::message_of;

static_assert(syncnorm::async_communicator<gloo_communicator>);
static_assert(syncnorm::splits<gloo_communicator> && syncnorm::aborts<gloo_communicator>);

namespace {

std::shared_ptr<gloo::Context> connect(std::string const& directory, int rank, int size) {
  auto const store = syncnorm::make_gloo_store("file:" + directory);
  return syncnorm::make_gloo_context(rank, size, *store, {.hostname = "127.0.0.1", .timeout = 60s});
}

/// Runs body(rank, context) on `size` processes whose contexts are connected.
template <class Body>
std::vector<test_support::process_outcome> run_ranks(int size, Body body) {
  test_support::temporary_directory const directory;
  return test_support::run_processes(size, 60s, [&](int rank) { body(rank, connect(directory.path(), rank, size)); });
}

/// Sums of these depend on their order.
std::vector<float> uneven_values(int rank, std::size_t extent) {
  std::vector<float> all(extent);
  constexpr std::size_t period = 1000;
  for (std::size_t i = 0; i < extent; ++i)
    all[i] = i >= period ? all[i - period]
                         : std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 1)) *
                               std::pow(10.0f, static_cast<float>((static_cast<std::size_t>(rank) + i) % 5));
  return all;
}

constexpr std::size_t eager = 1000, staged = 50'001, large = 3'000'000; // extents of float

} // namespace

TEST_CASE("gloo_communicator keeps the contract over processes") {
  for (int const size : {1, 2, 3, 4, 7})
    test_support::check_passed(run_ranks(size, [](int, auto context) {
      gloo_communicator const comm{std::move(context), 60s};
      contract::check_contract(comm);
      CHECK((comm.cost_of_exchange() == test::gloo_cost));
    }));
}

TEST_CASE("memory does not grow while an operation is open") {
  test_support::check_passed(run_ranks(2, [](int, auto context) {
    gloo_communicator const comm{std::move(context), 60s};
    std::vector<float> const in(4);
    std::vector<float> out(8), of_open(8);
    auto const steps = [&](int n) {
      for (int i = 0; i < n; ++i) syncnorm::allgather(comm, std::span{in}, std::span{out});
    };
    auto const allocated = [] {
      auto const all = mallinfo2();
      return all.uordblks + all.hblkhd;
    };
    steps(20);
    auto open = syncnorm::allgather_async(comm, std::span{in}, std::span{of_open});
    steps(20);
    auto const before = allocated();
    steps(200); // of which each takes 64 KB
    CHECK(allocated() <= before + 1'000'000);
    open.wait();
  }));
}

TEST_CASE("a sum has the bits of the sum in rank order, whatever its extent") {
  test_support::check_passed(run_ranks(3, [](int rank, auto context) {
    gloo_communicator const comm{std::move(context), 60s};
    for (auto const extent : {eager, staged, large}) {
      INFO("extent ", extent);
      auto expected = uneven_values(0, extent);
      for (int r = 1; r < 3; ++r) {
        auto const more = uneven_values(r, extent);
        for (std::size_t i = 0; i < extent; ++i) expected[i] += more[i];
      }
      auto data = uneven_values(rank, extent);
      syncnorm::allreduce(comm, std::span<float const>{data}, std::span{data});
      CHECK(std::memcmp(data.data(), expected.data(), extent * sizeof(float)) == 0);
    }
  }));
}

TEST_CASE("ranks that disagree all learn of it, and the communicator works on") {
  test_support::check_passed(run_ranks(3, [](int rank, auto context) {
    gloo_communicator const comm{std::move(context), 60s};
    for (auto const extent : {std::size_t{0}, eager, std::size_t{8182}, staged}) { // a packet holds 8182 float
      INFO("extent ", extent);
      auto const own = extent + (rank == 1 ? 1 : 0);
      std::vector<float> const in(own);
      std::vector<float> gathered(own * 3), reduced(own);
      CHECK_THROWS_AS(syncnorm::allgather(comm, in, std::span{gathered}), syncnorm::mismatch_error);
      CHECK_THROWS_AS(syncnorm::allreduce(comm, in, std::span{reduced}), syncnorm::mismatch_error);
      CHECK_THROWS_AS(syncnorm::broadcast(comm, std::span{reduced}, 2), syncnorm::mismatch_error);
      auto work = syncnorm::allgather_async(comm, in, std::span{gathered});
      auto next =
          syncnorm::allreduce_async(comm, std::span<float const>{reduced}.first(0), std::span{reduced}.first(0));
      CHECK_THROWS_AS(work.wait(), syncnorm::mismatch_error);
      CHECK_THROWS_AS(work.test(), syncnorm::mismatch_error);
      next.wait();
      contract::check_allgather<double>(comm, extent, 1);
    }
    std::vector<float> data(100);
    auto const message = message_of([&] {
      syncnorm::allreduce(comm, data, std::span{data}, rank == 1 ? syncnorm::reduce_op::max : syncnorm::reduce_op::sum);
    });
    CHECK(contains(message, "ranks 0, 2: allreduce (sum) of 100 float"));
    CHECK(contains(message, "rank 1: allreduce (max) of 100 float"));
    CHECK_THROWS_AS(syncnorm::broadcast(comm, std::span{data}, rank == 0 ? 1 : 2), syncnorm::mismatch_error);
    CHECK_THROWS_AS(comm.scatter<float>(data, std::span{data}.first(33), 1), syncnorm::invalid_argument_error);
    contract::check_allreduce<float>(comm, staged, 2, syncnorm::reduce_op::sum);
  }));
}

TEST_CASE("the longest timeout there is waits") {
  test_support::check_passed(run_ranks(2, [](int rank, auto context) {
    gloo_communicator const comm{context, std::chrono::milliseconds::max()};
    if (rank == 0) std::this_thread::sleep_for(20ms);
    comm.barrier();
    comm.split(0, rank).barrier();
  }));
}

TEST_CASE("a rank that does not join is a timeout that names it") {
  test_support::check_passed(run_ranks(3, [](int rank, auto context) {
    for (auto const extent : {eager, staged}) {
      std::vector<float> data(extent);
      gloo_communicator const world{context, 60s};
      {
        gloo_communicator const comm{world.split(0, 0).context(), 300ms}; // its connections are its own
        if (rank != 1) {
          auto const started = std::chrono::steady_clock::now();
          auto const message = message_of([&] { syncnorm::allreduce(comm, data, std::span{data}); });
          // The other rank may be the first to time out, and close its connections.
          CHECK((contains(message,
                          "waited 300 ms in allreduce (sum) of " + std::to_string(extent) + " float for rank 1") ||
                 contains(message, "lost its connection")));
          if (!contains(message, "lost its connection")) CHECK(std::chrono::steady_clock::now() - started >= 300ms);
          CHECK(contains(message_of([&] { comm.barrier(); }), "cannot be used any more"));
        }
        world.barrier();
        if (rank == 1) CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error); // it comes too late
      }
      {
        gloo_communicator const comm{world.split(0, 0).context(), 300ms};
        if (rank != 0) {
          auto work = syncnorm::allreduce_async(comm, data, std::span{data});
          auto const poll = [&] {
            while (!work.test()) std::this_thread::yield();
          };
          CHECK_THROWS_AS(poll(), syncnorm::communicator_error);
          CHECK_THROWS_AS(work.wait(), syncnorm::communicator_error);
        }
        contract::check_allgather<float>(world, extent, 3); // everything else still works
      }
    }
  }));
  // Alone with the missing rank, it is always the timeout that is seen.
  test_support::check_passed(run_ranks(2, [](int rank, auto context) {
    float value = 0;
    gloo_communicator const world{context, 60s}, comm{context, 200ms};
    if (rank == 0)
      CHECK_THROWS_AS(syncnorm::allreduce(comm, std::span{&value, 1}, std::span{&value, 1}), syncnorm::timeout_error);
    CHECK_THROWS_AS(world.barrier(), syncnorm::communicator_error); // the connections were those of the context
  }));
}

TEST_CASE("a rank that dies is an error on the others, long before the timeout") {
  for (auto const extent : {eager, large}) {
    for (bool const midway : {false, true}) {
      INFO("extent ", extent, midway ? ", midway" : ", before");
      auto const outcomes = run_ranks(3, [&](int rank, auto context) {
        gloo_communicator const comm{std::move(context), 1h};
        std::vector<float> data(extent);
        contract::check_allgather<float>(comm, 10, 1);
        if (rank == 1) {
          auto const work = midway ? syncnorm::allreduce_async(comm, data, std::span{data}) : syncnorm::gloo_work{};
          std::raise(SIGKILL);
        }
        auto const three_times = [&] {
          for (int i = 0; i < 3; ++i) syncnorm::allreduce(comm, data, std::span{data});
        };
        auto const lost = "rank " + std::to_string(rank) + " lost its connection to rank ";
        auto const message = message_of(three_times);
        CHECK(contains(message, lost));
        CHECK(contains(message,
                       "in allreduce (sum) of " + std::to_string(extent) + " float; that rank ended, or gave up"));
        CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error);
        CHECK(contains(message_of([&] { gloo_communicator{comm.context(), 1h}.barrier(); }), lost));
      });
      CHECK(outcomes[1].signal == SIGKILL);
      test_support::check_passed({outcomes[0], outcomes[2]});
    }
  }
}

TEST_CASE("abort fails every rank that waits") {
  test_support::check_passed(run_ranks(3, [](int rank, auto context) {
    gloo_communicator const comm{std::move(context), 1h};
    auto const barriers = [&] {
      for (;;) comm.barrier();
    };
    comm.barrier();
    if (rank == 1) {
      std::jthread const aborts{[&] { comm.abort(); }};
      CHECK(contains(message_of(barriers), "aborted on rank 1"));
    } else {
      CHECK_THROWS_AS(barriers(), syncnorm::communicator_error);
    }
  }));
}

TEST_CASE("a rank hears of one that aborts or dies while it waits for another, too") {
  for (bool const dies : {false, true})
    for (int const lost : {1, 2}) {
      INFO("rank ", lost, std::string{dies ? " dies" : " aborts"});
      auto const outcomes = run_ranks(3, [&](int rank, auto context) {
        gloo_communicator const comm{std::move(context), 10s};
        comm.barrier();
        if (rank == lost) {
          std::this_thread::sleep_for(100ms);
          if (dies) _exit(9);
          comm.abort();
        } else if (rank == 0) {
          auto const message = message_of<syncnorm::communicator_error>([&] { comm.barrier(); });
          CHECK_MESSAGE(contains(message, "lost its connection to rank " + std::to_string(lost) + " in barrier"),
                        message);
        } else {
          std::this_thread::sleep_for(1s); // and never comes
        }
      });
      test_support::check_passed({outcomes[0], outcomes[static_cast<std::size_t>(3 - lost)]});
      CHECK(outcomes[static_cast<std::size_t>(lost)].exit_code == (dies ? 9 : 0));
    }
}

TEST_CASE("a timeout is that of one operation, and a part has that of the whole") {
  test_support::check_passed(run_ranks(2, [](int rank, auto context) {
    gloo_communicator const comm{context, 1s};
    for (int i = 0; i < 13; ++i) {
      if (rank == 0) std::this_thread::sleep_for(100ms);
      comm.barrier();
    }
    gloo_communicator const brief{context, 300ms};
    auto const part = brief.split(0, 0);
    if (rank == 1) return std::this_thread::sleep_for(1s); // alive, and not there
    auto const message = message_of<syncnorm::timeout_error>([&] { part.barrier(); });
    CHECK_MESSAGE(contains(message, "300 ms"), message);
  }));
}

TEST_CASE("whoever aborts and stays fails those that wait for it, at once") {
  test_support::check_passed(run_ranks(2, [](int rank, auto context) {
    gloo_communicator const comm{std::move(context), 20s};
    comm.barrier();
    auto const start = std::chrono::steady_clock::now();
    if (rank == 1) {
      comm.abort();
      return std::this_thread::sleep_for(3s);
    }
    CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error);
    CHECK(std::chrono::steady_clock::now() - start < 2500ms);
  }));
}

TEST_CASE("communicators share a context with each other and with Gloo's own collectives") {
  test_support::check_passed(run_ranks(3, [](int rank, auto context) {
    gloo_communicator const a{context, 60s}, b{context, 60s}, c{context, 60s, 7};
    for (int i = 0; i < 20; ++i) {
      auto const x = contract::values<float>(rank, staged, 1), y = contract::values<float>(rank, eager, 2);
      std::vector<float> x_out(3 * staged), y_out(3 * eager), z_out(3 * eager);
      auto first = syncnorm::allgather_async(a, x, std::span{x_out});
      auto second = syncnorm::allgather_async(c, y, std::span{y_out});
      gloo::AllgatherOptions options{context};
      options.setInput(const_cast<float*>(y.data()), eager);
      options.setOutput(z_out.data(), z_out.size());
      options.setTag(static_cast<std::uint32_t>(i));
      gloo::allgather(options);
      contract::check_allreduce<double>(b, 17, i, syncnorm::reduce_op::sum);
      if (rank == 1) second.wait();
      first.wait();
      second.wait();
      CHECK((x_out == contract::gathered<float>(3, staged, 1)));
      CHECK((y_out == contract::gathered<float>(3, eager, 2)));
      CHECK((y_out == z_out));
    }
  }));
}

TEST_CASE("an unusable context is refused") {
  CHECK_THROWS_AS(gloo_communicator{nullptr}, syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(gloo_communicator{std::make_shared<gloo::Context>(0, 2)}, syncnorm::gloo_error);
  CHECK_THROWS_AS((gloo_communicator{std::make_shared<gloo::Context>(0, 1), 0ms}), syncnorm::invalid_argument_error);
  test_support::check_passed(run_ranks(1, [](int, auto context) {
    CHECK_THROWS_AS((gloo_communicator{context, 1s, 0x80'0000u}), syncnorm::invalid_argument_error);
    gloo_communicator const comm{context};
    std::vector<float> const in(3);
    std::vector<float> out(2);
    CHECK_THROWS_AS(comm.scatter(std::span{in}, std::span{out}, 0), syncnorm::invalid_argument_error);
  }));
}
