#include <syncnorm/comm/checked.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>

#include "comm/bare.hpp"
#include "comm/contract.hpp"

using syncnorm::checked_communicator;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using bare_communicator = contract::bare<thread_communicator>;

static_assert(syncnorm::blocking_communicator<checked_communicator<bare_communicator>>);
static_assert(!syncnorm::async_communicator<checked_communicator<bare_communicator>>);
static_assert(!syncnorm::splits<checked_communicator<bare_communicator>>);
static_assert(syncnorm::async_communicator<checked_communicator<thread_communicator>>);
static_assert(syncnorm::splits<checked_communicator<thread_communicator>>);
static_assert(syncnorm::aborts<checked_communicator<thread_communicator>>);

namespace {

/// Does a byte gather alone, as every rank's must have the same extent there: whatever else reached this communicator
/// would be a call that the check has let through.
class gathers_bytes {
public:
  explicit gathers_bytes(thread_communicator inner) : inner_{std::move(inner)} {}
  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int size() const { return inner_.size(); }
  void allgather(std::span<std::byte const> in, std::span<std::byte> out) const {
    syncnorm::allgather(inner_, in, out);
  }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const>, std::span<T>) const {
    FAIL_CHECK("an operation on which the ranks disagree was started");
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const>, std::span<T>, syncnorm::reduce_op) const {
    FAIL_CHECK("an operation on which the ranks disagree was started");
  }

private:
  thread_communicator inner_;
};

/// Every rank must be told `expected` when two do `f` together, once and again.
template <class F>
void check_mismatch(F&& f, std::string const& expected) {
  run_ranks(2, [&](thread_communicator const& threads) {
    checked_communicator<gathers_bytes> const comm{gathers_bytes{threads}};
    for (int sequence = 0; sequence < 2; ++sequence) {
      std::string told = "nothing";
      try {
        f(comm);
      } catch (syncnorm::mismatch_error const& e) {
        told = e.what();
      }
      CHECK(told == "ranks disagree on collective " + std::to_string(sequence) + ": " + expected);
    }
  });
}

} // namespace

TEST_CASE("checked_communicator keeps the contract of what it wraps") {
  contract::check_contract(checked_communicator{syncnorm::self_communicator{}});
  for (int const ranks : {2, 3}) {
    run_ranks(ranks, [](thread_communicator const& comm) {
      contract::check_contract(checked_communicator{comm});
      contract::check_contract(checked_communicator{bare_communicator{comm}});
      contract::check_contract(checked_communicator{syncnorm::any_communicator{comm}});
    });
  }
}

TEST_CASE("ranks that disagree are told before anything is done") {
  std::vector<float> const floats(3);
  std::vector<double> const doubles(3);
  check_mismatch(
      [&](auto const& comm) {
        std::vector<float> out(6);
        auto const extent = static_cast<std::size_t>(comm.rank()) + 1;
        syncnorm::allgather(comm, std::span{floats}.first(extent), std::span{out}.first(2 * extent));
      },
      "rank 0: allgather of 1 float; rank 1: allgather of 2 float");
  check_mismatch(
      [&](auto const& comm) {
        std::vector<float> float_out(3);
        std::vector<double> double_out(3);
        if (comm.rank() == 0)
          syncnorm::allreduce(comm, floats, std::span{float_out});
        else
          syncnorm::allreduce(comm, doubles, std::span{double_out});
      },
      "rank 0: allreduce (sum) of 3 float; rank 1: allreduce (sum) of 3 double");
  check_mismatch(
      [&](auto const& comm) {
        std::vector<float> out(3);
        auto const op = comm.rank() == 0 ? syncnorm::reduce_op::max : syncnorm::reduce_op::min;
        syncnorm::reduce(comm, floats, std::span{out}, comm.rank(), op);
      },
      "rank 0: reduce (max) of 3 float to rank 0; rank 1: reduce (min) of 3 float to rank 1");
  check_mismatch(
      [&](auto const& comm) {
        std::vector<std::int64_t> data(3);
        if (comm.rank() == 0)
          syncnorm::broadcast(comm, std::span{data}, 1);
        else
          syncnorm::scatter(comm, {}, std::span{data}, 0);
      },
      "rank 0: broadcast of 3 int64 from rank 1; rank 1: scatter of 3 int64 from rank 0");
  check_mismatch(
      [&](auto const& comm) {
        std::vector<float> out(6);
        if (comm.rank() == 0)
          syncnorm::barrier(comm);
        else
          syncnorm::allgather(comm, floats, std::span{out});
      },
      "rank 0: barrier; rank 1: allgather of 3 float");
  check_mismatch(
      [](auto const& comm) {
        float value = 0;
        auto const op = comm.rank() == 0 ? syncnorm::reduce_op::min : syncnorm::reduce_op::max;
        comm.template allreduce<float>({&value, 1}, {&value, 1}, op);
      },
      "rank 0: allreduce (min) of 1 float; rank 1: allreduce (max) of 1 float");
}

TEST_CASE("ranks that disagree on what they start, split or scatter are told, too") {
  auto const check = [](auto const& f, std::string const& expected) {
    run_ranks(2, [&](thread_communicator const& threads) {
      checked_communicator const comm{threads};
      CHECK_THROWS_WITH_AS(f(comm), ("ranks disagree on collective 0: " + expected).c_str(), syncnorm::mismatch_error);
    });
  };
  check(
      [](auto const& comm) {
        float value = 0;
        auto const op = comm.rank() == 0 ? syncnorm::reduce_op::min : syncnorm::reduce_op::max;
        (void)comm.template allreduce_async<float>({&value, 1}, {&value, 1}, op);
      },
      "rank 0: allreduce (min) of 1 float; rank 1: allreduce (max) of 1 float");
  check(
      [](auto const& comm) {
        std::vector<float> in(2), out(1);
        comm.template scatter<float>(in, out, comm.rank());
      },
      "rank 0: scatter of 1 float from rank 0; rank 1: scatter of 1 float from rank 1");
  check(
      [](auto const& comm) {
        std::vector<float> in(2), out(4);
        if (comm.rank() == 0)
          (void)comm.template allgather_async<float>(in, out);
        else
          comm.barrier();
      },
      "rank 0: allgather of 2 float; rank 1: barrier");
  check(
      [](auto const& comm) {
        if (comm.rank() == 0)
          (void)comm.split(0, 0);
        else
          comm.barrier();
      },
      "rank 0: split; rank 1: barrier");
}

TEST_CASE("a rank that lost count is told so") {
  run_ranks(2, [](thread_communicator const& threads) {
    checked_communicator const first{threads}, second{threads};
    if (threads.rank() == 0)
      first.barrier();
    else
      second.barrier();
    CHECK_THROWS_WITH_AS(first.barrier(),
                         "ranks disagree on collective 1: rank 0: barrier; rank 1: barrier as collective 0",
                         syncnorm::mismatch_error);
  });
}

TEST_CASE("a checked communicator costs what the one within does, and overlaps what it does") {
  run_ranks(2, [](thread_communicator const& threads) {
    syncnorm::any_communicator const blocking{contract::bare{threads}};
    CHECK(syncnorm::overlaps(checked_communicator{threads}) == syncnorm::overlaps(threads));
    CHECK_FALSE(syncnorm::overlaps(checked_communicator{blocking}));
    CHECK(syncnorm::exchange_overhead(checked_communicator{threads}) == syncnorm::exchange_overhead(threads));
    CHECK(syncnorm::cost_of_exchange(checked_communicator{threads}) == syncnorm::cost_of_exchange(threads));
  });
}
