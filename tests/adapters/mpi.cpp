#include <chrono>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/adapters/mpi.hpp>

#include "comm/contract.hpp"
#include "support/allocations.hpp"
#include "support/exchange_costs.hpp"
#include "support/message_of.hpp"

using namespace std::chrono_literals;
using syncnorm::mpi_communicator;
using test_support::contains, test_support::message_of;

static_assert(syncnorm::async_communicator<mpi_communicator>);
static_assert(syncnorm::splits<mpi_communicator> && syncnorm::aborts<mpi_communicator>);

namespace {

/// A communicator that is not freed: MPI_Comm_free would wait for an operation that never completes.
MPI_Comm abandoned_duplicate() {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  return copy;
}

} // namespace

TEST_CASE("mpi_communicator keeps the contract") {
  contract::check_contract(mpi_communicator{MPI_COMM_WORLD, 60s});
  auto const own = mpi_communicator::duplicate(MPI_COMM_WORLD, 60s);
  contract::check_contract(own);
  CHECK((own.cost_of_exchange() == test::mpi_cost));
}

TEST_CASE("data that are cut into pieces arrive whole") {
  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 60s);
  constexpr std::size_t extent = 200'001;
  contract::check_allgather<double>(comm, extent, 1);
  contract::check_allreduce<double>(comm, extent, 2, syncnorm::reduce_op::sum);
  std::vector<double> data(extent, comm.rank());
  comm.broadcast(std::span{data}, comm.size() - 1);
  CHECK((data == std::vector<double>(extent, comm.size() - 1)));
  auto const parts = contract::gathered<double>(comm.size(), extent, 3);
  comm.scatter<double>(comm.rank() == 0 ? std::span<double const>{parts} : std::span<double const>{}, data, 0);
  CHECK((data == contract::values<double>(comm.rank(), extent, 3)));
  std::vector<double> sum(comm.rank() == 0 ? extent : 0);
  comm.reduce<double>(data, sum, 0, syncnorm::reduce_op::sum);
  if (comm.rank() == 0) CHECK((sum == contract::reduced<double>(comm.size(), extent, 3, syncnorm::reduce_op::sum)));
}

TEST_CASE("counts beyond int are counted in larger units") {
  using syncnorm::detail::mpi_unit;
  CHECK(mpi_unit(0) == 1);
  CHECK(mpi_unit(2'147'483'647) == 1);
  CHECK(mpi_unit(2'147'483'648) == 2);
  CHECK(mpi_unit(std::size_t{1} << 40) == 1024);
  CHECK(mpi_unit(10, 3) == 4);
}

TEST_CASE("a rank that lacks the memory for an operation throws, and has started nothing") {
  auto const comm = syncnorm::mpi_communicator::duplicate(MPI_COMM_SELF);
  std::size_t size = 0;
  auto const check = [&](std::size_t more, auto const& operation) {
    int failures = 0;
    for (bool failed = true; failed; failures += failed ? 1 : 0) {
      REQUIRE(failures < 20);
      std::vector<double> const in(size += more, 1.5); // of which none had as many before
      std::vector<double> out(size);
      test::fail_allocation(failures);
      try {
        operation(std::span{in}, std::span{out});
        failed = false;
      } catch (std::bad_alloc const&) {
      }
      test::fail_allocation(-1);
      CHECK(out == (failed ? std::vector<double>(size) : in));
    }
    CHECK(failures > 1);
  };
  using in_type = std::span<double const>;
  using out_type = std::span<double>;
  check(100, [&](in_type in, out_type out) { syncnorm::allgather(comm, in, out); });
  check(100, [&](in_type in, out_type out) { syncnorm::allgather_async(comm, in, out).wait(); });
  check(100, [&](in_type in, out_type out) { syncnorm::allreduce(comm, in, out); });
  check(20000, [&](in_type in, out_type out) { syncnorm::allreduce(comm, in, out); });
  check(100, [&](in_type in, out_type out) { comm.scatter(in, out, 0); });
}

TEST_CASE("a rank that lacked the memory for an operation tries again, and no rank is out of step") {
  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 10s);
  auto const ranks = static_cast<std::size_t>(comm.size());
  int failed = 0;
  for (int n = 0; n < 16; ++n) {
    std::size_t const size = 1000 * static_cast<std::size_t>(n + 1); // as none had before
    std::vector<double> const in(size, comm.rank());
    std::vector<double> out(size * ranks);
    auto const gather = [&] { syncnorm::allgather(comm, std::span{in}, std::span{out}); };
    try {
      if (comm.rank() == 0) test::fail_allocation(n);
      gather();
      test::fail_allocation(-1);
    } catch (std::bad_alloc const&) {
      ++failed;
      gather();
    }
    for (std::size_t r = 0; r < ranks; ++r) CHECK(out[r * size] == static_cast<double>(r));
  }
  if (comm.rank() == 0) CHECK(failed > 1);
}

TEST_CASE("a null MPI_Comm and a bad timeout are refused") {
  CHECK_THROWS_AS(mpi_communicator{MPI_COMM_NULL}, syncnorm::invalid_argument_error);
  CHECK_THROWS_AS((mpi_communicator{MPI_COMM_WORLD, 0ms}), syncnorm::invalid_argument_error);
}

TEST_CASE("ranks that disagree all learn of it") {
  auto const world = mpi_communicator{MPI_COMM_WORLD, 60s};
  if (world.size() == 1) return;
  auto const ranks = static_cast<std::size_t>(world.size());
  auto const refused = [&](auto const& call) {
    auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 10s);
    CHECK_THROWS_AS(call(comm), syncnorm::mismatch_error);
    CHECK_THROWS_AS(comm.barrier(), syncnorm::communicator_error);
    world.barrier();
  };
  for (auto const extent : {std::size_t{1}, std::size_t{3000}, std::size_t{300'000}}) {
    INFO("extent ", extent);
    auto const own = extent + (world.rank() == 1 ? 1 : 0);
    std::vector<float> const in(own);
    std::vector<float> gathered(own * ranks), reduced(own);
    refused([&](auto const& comm) { syncnorm::allgather(comm, in, std::span{gathered}); });
    refused([&](auto const& comm) { syncnorm::allreduce(comm, in, std::span{reduced}); });
    refused([&](auto const& comm) { syncnorm::allgather_async(comm, in, std::span{gathered}).wait(); });
    refused([&](auto const& comm) { syncnorm::broadcast(comm, std::span{reduced}, 0); });
  }
  // What one rank sends is more than another has room for.
  for (auto const extent : {std::size_t{700}, std::size_t{30'000}, std::size_t{300'000}}) {
    INFO("extent ", extent);
    std::size_t const own = world.rank() == 0 ? 10 : extent;
    std::vector<double> const in(own);
    std::vector<double> gathered(own * ranks), reduced(own);
    refused([&](auto const& comm) { syncnorm::allgather(comm, in, std::span{gathered}); });
    refused([&](auto const& comm) { syncnorm::allreduce(comm, in, std::span{reduced}); });
    refused([&](auto const& comm) { syncnorm::allgather_async(comm, in, std::span{gathered}).wait(); });
    refused([&](auto const& comm) { syncnorm::allreduce_async(comm, in, std::span{reduced}).wait(); });
    refused([&](auto const& comm) {
      std::vector<double> const few(10);
      std::vector<double> of_few(10 * ranks);
      auto first = syncnorm::allgather_async<double>(comm, world.rank() == 0 ? few : in,
                                                     std::span{world.rank() == 0 ? of_few : gathered});
      auto second = syncnorm::allgather_async<double>(comm, few, std::span{of_few});
      first.wait();
    });
    // Memory that was written beyond its end would be noticed here.
    std::vector<std::vector<std::byte>> blocks;
    for (std::size_t i = 1; i < 2000; ++i) blocks.emplace_back(i * 7 % 5000 + 1);
  }
  std::vector<float> floats(100);
  std::vector<std::int32_t> integers(100);
  refused([&](auto const& comm) {
    if (comm.rank() == 0)
      syncnorm::allreduce(comm, floats, std::span{floats});
    else
      syncnorm::allreduce(comm, integers, std::span{integers});
  });
  auto const message = message_of([&] {
    auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 10s);
    syncnorm::allreduce(comm, floats, std::span{floats},
                        comm.rank() == 1 ? syncnorm::reduce_op::max : syncnorm::reduce_op::sum);
  });
  CHECK(contains(message, "allreduce (sum) of 100 float"));
  CHECK(contains(message, "rank 1: allreduce (max) of 100 float"));

  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 10s);
  std::vector<float> one(1), wrong(ranks + 1);
  CHECK_THROWS_AS(comm.scatter<float>(wrong, one, 0), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(comm.reduce<float>(one, wrong, 0, syncnorm::reduce_op::sum), syncnorm::invalid_argument_error);
  contract::check_allgather<float>(comm, 5, 1);
}

TEST_CASE("the longest timeout there is waits") {
  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, std::chrono::milliseconds::max());
  if (comm.rank() == 0) std::this_thread::sleep_for(20ms);
  comm.barrier();
}

TEST_CASE("a rank that does not join is a timeout, and the communicator is unusable afterwards") {
  auto const world = mpi_communicator{MPI_COMM_WORLD, 60s};
  if (world.size() == 1) return;
  for (auto const extent : {std::size_t{3}, std::size_t{300'000}}) {
    mpi_communicator const comm{abandoned_duplicate(), 200ms};
    std::vector<float> data(extent), all(extent * static_cast<std::size_t>(world.size()));
    if (world.rank() != world.size() - 1) {
      auto const started = std::chrono::steady_clock::now();
      CHECK_THROWS_AS(syncnorm::allreduce(comm, data, std::span{data}), syncnorm::timeout_error);
      CHECK(std::chrono::steady_clock::now() - started >= 200ms);
      CHECK(contains(message_of([&] { syncnorm::allgather(comm, data, std::span{all}); }), "cannot be used any more"));
    }
    world.barrier(); // everything else still works

    mpi_communicator const async{abandoned_duplicate(), 200ms};
    if (world.rank() != 0 && extent > 1000) { // too much to begin before all agree
      CHECK_THROWS_AS((void)syncnorm::allgather_async(async, data, std::span{all}), syncnorm::timeout_error);
    } else if (world.rank() != 0) {
      auto work = syncnorm::allgather_async(async, data, std::span{all});
      CHECK_THROWS_AS(
          [&] {
            while (!work.test()) std::this_thread::yield();
          }(),
          syncnorm::timeout_error);
      CHECK_THROWS_AS(work.wait(), syncnorm::timeout_error);
    }
    world.barrier();
  }
}

TEST_CASE("a rank that comes too late to a split is left alone by none that waits without end") {
  auto const world = mpi_communicator{MPI_COMM_WORLD, 60s};
  if (world.size() == 1) return;
  mpi_communicator const comm{abandoned_duplicate(), 200ms};
  if (world.rank() == 0) std::this_thread::sleep_for(500ms); // by when the others have given up
  CHECK_THROWS_AS(static_cast<void>(comm.split(0, 0)), syncnorm::timeout_error);
  world.barrier();
}

TEST_CASE("a timeout is that of one operation, and a part has that of the whole") {
  if (mpi_communicator{MPI_COMM_WORLD}.size() != 2) return;
  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 1s);
  for (int i = 0; i < 13; ++i) {
    if (comm.rank() == 0) std::this_thread::sleep_for(100ms);
    comm.barrier();
  }
  auto const brief = mpi_communicator::duplicate(MPI_COMM_WORLD, 300ms);
  auto const part = brief.split(0, 0);
  if (brief.rank() == 0) {
    auto const message = message_of<syncnorm::timeout_error>([&] { part.barrier(); });
    CHECK_MESSAGE(contains(message, "300 ms"), message);
  }
  comm.barrier();
}

TEST_CASE("what is duplicated or split returns errors, and is freed") {
  if (mpi_communicator{MPI_COMM_WORLD}.size() != 2) return;
  static int freed = 0;
  auto const count = [](MPI_Comm, int, void*, void*) {
    ++freed;
    return MPI_SUCCESS;
  };
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, count, &key, nullptr);
  {
    auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD);
    auto const part = comm.split(0, 0);
    for (auto const* each : {&comm, &part}) {
      MPI_Errhandler handler{};
      MPI_Comm_get_errhandler(each->native_handle(), &handler);
      CHECK(handler == MPI_ERRORS_RETURN);
      MPI_Comm_set_attr(each->native_handle(), key, nullptr);
    }
  }
  CHECK(freed == 2);
  MPI_Comm_free_keyval(&key);
}

TEST_CASE("an intercommunicator is refused") {
  mpi_communicator const world{MPI_COMM_WORLD};
  if (world.size() != 2) return;
  MPI_Comm half = MPI_COMM_NULL, both = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world.rank(), 0, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - world.rank(), 5, &both);
  CHECK_THROWS_AS(mpi_communicator{both}, syncnorm::invalid_argument_error);
  MPI_Comm_free(&both), MPI_Comm_free(&half);
}

TEST_CASE("abort fails what waits on this rank") {
  auto const comm = mpi_communicator::duplicate(MPI_COMM_WORLD, 60s);
  if (comm.size() == 1) return;
  float value = 0;
  if (comm.rank() == 0) {
    std::jthread const aborts{[&] { comm.abort(); }};
    CHECK_THROWS_AS(syncnorm::allreduce(comm, std::span{&value, 1}, std::span{&value, 1}),
                    syncnorm::communicator_error);
  }
  mpi_communicator{MPI_COMM_WORLD}.barrier();
}

int main(int argc, char** argv) {
  auto const before = message_of([] { mpi_communicator const early{MPI_COMM_WORLD}; });
  MPI_Init(&argc, &argv);
  int failed = doctest::Context{argc, argv}.run();
  mpi_communicator const outlives{MPI_COMM_WORLD};
  float const own = 0;
  std::vector<float> all(static_cast<std::size_t>(2 * outlives.size()));
  auto const start = [&](std::size_t first) {
    auto const ranks = static_cast<std::size_t>(outlives.size());
    return outlives.allgather_async(std::span{&own, 1}, std::span{all}.subspan(first * ranks, ranks));
  };
  auto in_flight = start(0);
  auto const dropped = start(1); // as by a layer that goes after MPI
  MPI_Finalize();
  auto const after = message_of([] { mpi_communicator const late{MPI_COMM_WORLD}; });
  auto const used = message_of([&] { outlives.barrier(); });
  auto const awaited = message_of([&] { in_flight.wait(); });
  if (!contains(before, "not initialized") || !contains(after, "finalized") || !contains(used, "finalized") ||
      !contains(awaited, "finalized"))
    failed = 1;
  return failed;
}
