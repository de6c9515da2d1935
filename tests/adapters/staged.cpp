#include <syncnorm/adapters/staged.hpp>

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>

#include "comm/bare.hpp"
#include "cuda/fake_runtime.hpp"
#include "cuda/stream_contract.hpp"
#include "support/throws.hpp"

namespace {

using staged_threads = syncnorm::staged<syncnorm::thread_communicator>;
static_assert(syncnorm::stream_communicator<staged_threads> && !staged_threads::capturable());
static_assert(syncnorm::splits<staged_threads> && syncnorm::aborts<staged_threads>);

/// The communicator of one rank, after whose collectives a stream has something to do before anything else.
struct busy_host {
  cudaStream_t busy;

  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    std::ranges::copy(in, out.begin());
    fake_cuda::enqueue(busy, [] { std::this_thread::sleep_for(std::chrono::milliseconds{20}); });
  }
};

/// One allgather of two numbers on a stream of its own.
struct gather_of_two {
  test::device_buffer<float> in{{1, 2}}, out;
  test::stream on{};

  explicit gather_of_two(staged_threads const& comm) : out{2 * static_cast<std::size_t>(comm.size())} {}
  void operator()(staged_threads const& comm) const {
    syncnorm::allgather(comm, in.span(), out.span(), on);
    on.wait();
  }
};
void gather(staged_threads const& comm) { gather_of_two{comm}(comm); }

} // namespace

TEST_CASE("device memory over a communicator of the host keeps the contract of streams") {
  for (int const ranks : {1, 2, 4})
    syncnorm::run_ranks(ranks, [](auto const& threads) {
      staged_threads const comm{threads};
      stream_contract::check_contract(comm, false);
      auto const parity = syncnorm::split(comm, comm.rank() % 2);
      CHECK(parity.size() == (comm.size() + 1 - comm.rank() % 2) / 2);
      stream_contract::check_contract(parity, false);
    });
  stream_contract::check_contract(syncnorm::staged{syncnorm::self_communicator{}}, false);
}

TEST_CASE("what was pinned is kept, and given back") {
  auto const before = fake_cuda::allocated();
  {
    syncnorm::staged const comm{syncnorm::self_communicator{}};
    test::stream const on;
    test::device_buffer<double> const in{std::vector<double>(100, 1.0)}, out{100};
    syncnorm::allgather(comm, in.span(), out.span(), on);
    fake_cuda::reset();
    for (auto const extent : {std::size_t{100}, std::size_t{1}, std::size_t{50}})
      syncnorm::allgather(comm, in.span().first(extent), out.span().first(extent), on);
    CHECK(fake_cuda::calls("cudaHostAlloc") == 0);
    on.wait();
  }
  CHECK(fake_cuda::allocated() == before);
}

TEST_CASE("an exchange on another stream leaves what a stream is still to copy back") {
  test::device_buffer<float> const one{{1, 2}}, two{{3, 4}}, first{2}, second{2};
  test::stream const on, other;
  syncnorm::staged const comm{busy_host{on}};
  syncnorm::allgather(comm, one.span(), first.span(), on);
  syncnorm::allgather(comm, two.span(), second.span(), other);
  on.wait();
  other.wait();
  CHECK((first.get() == std::vector<float>{1, 2}));
  CHECK((second.get() == std::vector<float>{3, 4}));
}

TEST_CASE("a rank may exchange on one device and then on another") {
  syncnorm::run_ranks(2, [](auto const& threads) {
    staged_threads const comm{threads};
    for (int const device : {0, 1, 1, 0}) {
      cudaSetDevice(device);
      gather(comm);
    }
  });
}

TEST_CASE("a stream that is being captured is an error on every rank, and nothing is exchanged") {
  syncnorm::run_ranks(2, [](auto const& threads) {
    staged_threads const comm{threads};
    test::stream const on;
    test::device_buffer<float> const in{{1, 2}}, out{4};
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_THROWS_AS(syncnorm::allgather(comm, in.span(), out.span(), on), syncnorm::invalid_argument_error);
    CHECK(cudaStreamEndCapture(on, &graph) == cudaSuccess);
    cudaGraphDestroy(graph);
    gather(comm);
  });
}

TEST_CASE("a failure of CUDA on one rank is an error on all") {
  for (char const* const function : {"cudaMemcpyAsync", "cudaStreamSynchronize", "cudaHostAlloc", "cudaEventRecord"}) {
    CAPTURE(function);
    syncnorm::run_ranks(3, [&](auto const& threads) {
      staged_threads const comm{threads};
      gather_of_two const step{comm};
      threads.barrier();
      if (comm.rank() == 1) fake_cuda::fail_next(function, cudaErrorIllegalAddress);
      threads.barrier();
      // One rank meets the failure; the others find themselves without it, in this exchange or in the next.
      bool failed = false;
      for (int i = 0; i < 2 && !failed; ++i) {
        try {
          step(comm);
        } catch (syncnorm::error const&) {
          failed = true;
        }
      }
      CHECK(failed);
      CHECK_THROWS_AS(step(comm), syncnorm::communicator_error);
    });
    fake_cuda::reset();
  }
}

TEST_CASE("a late peer is a timeout, and ranks that disagree get the host's error") {
  using namespace std::chrono_literals;
  syncnorm::run_ranks(
      2,
      [](auto const& threads) {
        staged_threads const comm{threads};
        if (comm.rank() == 0) CHECK_THROWS_AS(gather(comm), syncnorm::timeout_error);
      },
      100ms);
  syncnorm::run_ranks(2, [](auto const& threads) {
    staged_threads const comm{threads};
    test::stream const on;
    auto const extent = static_cast<std::size_t>(1 + comm.rank());
    test::device_buffer<float> const in{std::vector<float>(extent)}, out{2 * extent};
    CHECK_THROWS_AS(syncnorm::allgather(comm, in.span(), out.span(), on), syncnorm::mismatch_error);
    gather(comm); // threads go on after a disagreement
  });
}

TEST_CASE("over a communicator that cannot abort, a failure is remembered here, and costs are those of that one") {
  syncnorm::thread_group const group{1};
  syncnorm::staged const comm{contract::bare{group.communicator(0)}};
  test::device_buffer<float> const in{{1, 2}}, out{2};
  test::stream const on;
  auto const gathers = [&] { syncnorm::allgather(comm, in.span(), out.span(), on); };
  fake_cuda::fail_next("cudaMemcpyAsync", cudaErrorIllegalAddress);
  CHECK_THROWS_AS(gathers(), syncnorm::cuda_error);
  CHECK_THROWS_WITH_AS(gathers(), doctest::Contains("cannot be used any more"), syncnorm::communicator_error);
  // Of which it is known only when it is asked.
  syncnorm::staged const erased{syncnorm::any_communicator{contract::bare{group.communicator(0)}}};
  fake_cuda::fail_next("cudaMemcpyAsync", cudaErrorIllegalAddress);
  CHECK_THROWS_AS(syncnorm::allgather(erased, in.span(), out.span(), on), syncnorm::cuda_error);
  auto const threads = group.communicator(0);
  CHECK(syncnorm::cost_of_exchange(syncnorm::staged{threads}) == syncnorm::cost_of_exchange(threads));
}
