#include <syncnorm/adapters/nccl.hpp>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/collectives.hpp>

#include "cuda/fake_nccl.hpp"
#include "cuda/fake_runtime.hpp"
#include "cuda/stream_contract.hpp"

namespace {

using syncnorm::nccl_communicator;
static_assert(syncnorm::stream_communicator<nccl_communicator>);
static_assert(!syncnorm::allgathers<nccl_communicator, float>, "there is nothing for host memory");
static_assert(syncnorm::splits<nccl_communicator> && syncnorm::aborts<nccl_communicator>);

/// f(comm) on a thread for each rank of a group; the communicators are destroyed, or freed by an abort.
void on_ranks(int size, std::function<void(ncclComm_t)> const& f) {
  std::vector<std::jthread> threads;
  for (auto* const comm : fake_nccl::make_group(size)) threads.emplace_back([=] { f(comm); });
}

struct gather_of_two {
  test::device_buffer<float> in{{1, 2}}, out;
  test::stream on;

  explicit gather_of_two(int ranks) : out{2 * static_cast<std::size_t>(ranks)} {}
  void operator()(nccl_communicator const& comm) { syncnorm::allgather(comm, in.span(), out.span(), on); }
};

} // namespace

TEST_CASE("NCCL keeps the contract of streams, enqueued and captured") {
  for (int const ranks : {1, 3})
    on_ranks(ranks, [](ncclComm_t raw) {
      auto const comm = nccl_communicator::adopt(raw);
      CHECK(comm.native_handle() == raw);
      for (bool const captured : {false, true}) stream_contract::check_contract(comm, captured);
      auto const parity = syncnorm::split(comm, comm.rank() % 2, -comm.rank());
      CHECK(parity.size() == (comm.size() + 1 - comm.rank() % 2) / 2);
      CHECK(parity.rank() == parity.size() - 1 - comm.rank() / 2);
      stream_contract::check_contract(parity, true);
    });
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("the host waits for nobody, and a group is enqueued at its end") {
  auto const raw = fake_nccl::make_group(2);
  std::vector<nccl_communicator> ranks{nccl_communicator::adopt(raw[0]), nccl_communicator::adopt(raw[1])};
  std::array<gather_of_two, 2> work{gather_of_two{2}, gather_of_two{2}};
  for (std::size_t r = 0; r < 2; ++r) work[r](ranks[r]); // one thread for both
  for (auto& each : work) each.on.wait();
  CHECK((work[0].out.get() == std::vector<float>{1, 2, 1, 2}));

  work[0].out.put({0, 0, 0, 0});
  ranks[1].batch([&] {
    work[1](ranks[1]);
    work[1](ranks[1]);
    std::this_thread::sleep_for(std::chrono::milliseconds{5});
    CHECK(cudaStreamQuery(work[1].on) == cudaSuccess); // nothing there to wait for yet
  });
  ranks[0].batch([&] { work[0](ranks[0]), work[0](ranks[0]); });
  for (auto& each : work) each.on.wait();
  CHECK((work[0].out.get() == std::vector<float>{1, 2, 1, 2}));
}

TEST_CASE("an error of a peer comes up in the next call, in check and in synchronize") {
  for (int const where : {0, 1, 2})
    on_ranks(2, [&](ncclComm_t raw) {
      auto const comm = nccl_communicator::adopt(raw);
      gather_of_two gather{2};
      gather(comm);
      comm.synchronize(gather.on);
      syncnorm::check(comm);
      fake_nccl::set_async_error(raw, ncclRemoteError);
      std::string message;
      int code = 0;
      try {
        if (where == 0) gather(comm);
        if (where == 1) syncnorm::check(comm);
        if (where == 2) comm.synchronize(gather.on);
      } catch (syncnorm::nccl_error const& e) {
        message = e.what();
        code = e.native_code();
      }
      CHECK(message == "nccl: on the device or of a peer: remote process exited or there was a network error");
      CHECK(code == ncclRemoteError);
      CHECK_THROWS_WITH_AS(gather(comm), doctest::Contains("cannot be used any more"), syncnorm::nccl_error);
    });
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("a peer that never comes is a timeout, which ends what waits on the stream") {
  using namespace std::chrono_literals;
  on_ranks(2, [](ncclComm_t raw) {
    auto const comm = nccl_communicator::adopt(raw, 50ms);
    gather_of_two gather{2};
    if (comm.rank() == 1) return;
    gather(comm);
    CHECK_THROWS_AS(comm.synchronize(gather.on), syncnorm::timeout_error);
    CHECK(cudaGetLastError() == cudaSuccess); // that the stream was not ready is no error
    gather.on.wait();
    CHECK(comm.native_handle() == nullptr);
    CHECK_THROWS_AS(gather(comm), syncnorm::nccl_error);
    CHECK_THROWS_AS(comm.check(), syncnorm::nccl_error);
  });
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("a peer that never comes is a timeout in a step that is replayed, though NCCL waits for the graph's end to "
          "free anything") {
  using namespace std::chrono_literals;
  auto const raw = fake_nccl::make_group(2);
  ncclCommDestroy(raw[1]);
  auto comm = std::make_unique<nccl_communicator>(nccl_communicator::adopt(raw[0], 50ms));
  gather_of_two gather{2};
  test::graph step{gather.on, [&] { gather(*comm); }};
  step.launch();
  auto const failure = [&](auto const& call) -> std::string {
    try {
      call();
    } catch (syncnorm::timeout_error const&) {
      return "timeout";
    } catch (syncnorm::nccl_error const&) {
      return "error";
    }
    return "none";
  };
  auto waiting = std::async(std::launch::async, [&] { return failure([&] { comm->synchronize(gather.on); }); });
  bool const in_time = waiting.wait_for(20s) == std::future_status::ready;
  CHECK(in_time);
  if (in_time) {
    CHECK(fake_nccl::alive() == 1); // the graph keeps it
    gather.on.wait();
    step.launch(); // which does nothing any more
    gather.on.wait();
    CHECK(failure([&] { gather(*comm); }) == "error");
  }
  step.destroy();
  CHECK(waiting.get() == "timeout");
  comm.reset();
  for (int i = 0; i < 1000 && fake_nccl::alive() != 0; ++i) std::this_thread::sleep_for(5ms);
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("the last copy of a communicator that has failed does not wait for graphs") {
  using namespace std::chrono_literals;
  auto const raw = fake_nccl::make_group(1);
  gather_of_two gather{1};
  auto comm = std::make_unique<nccl_communicator>(nccl_communicator::adopt(raw[0]));
  test::graph step{gather.on, [&] { gather(*comm); }};
  fake_nccl::set_async_error(raw[0], ncclRemoteError);
  CHECK_THROWS_AS(comm->check(), syncnorm::nccl_error);
  auto ending = std::async(std::launch::async, [&] { comm.reset(); });
  CHECK(ending.wait_for(20s) == std::future_status::ready);
  step.destroy();
  ending.wait();
  for (int i = 0; i < 1000 && fake_nccl::alive() != 0; ++i) std::this_thread::sleep_for(5ms);
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("nobody frees a communicator while another thread asks it") {
  using namespace std::chrono_literals;
  auto const raw = fake_nccl::make_group(1);
  auto const comm = nccl_communicator::adopt(raw[0]);
  fake_nccl::set_slow_polls(raw[0], 100ms);
  {
    std::jthread const other{[&] {
      std::this_thread::sleep_for(20ms);
      comm.abort();
    }};
    comm.check();
  }
  CHECK_THROWS_WITH_AS(comm.check(), doctest::Contains("aborted on rank 0"), syncnorm::nccl_error);
  CHECK(fake_cuda::noted().empty());
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("ranks that gather different extents get an error, and abort ends the waiting") {
  on_ranks(2, [](ncclComm_t raw) {
    auto const comm = nccl_communicator::adopt(raw);
    test::stream const on;
    auto const extent = static_cast<std::size_t>(1 + comm.rank());
    test::device_buffer<float> const in{extent}, out{2 * extent};
    syncnorm::allgather(comm, in.span(), out.span(), on);
    CHECK_THROWS_AS(comm.synchronize(on), syncnorm::nccl_error);
  });
  on_ranks(2, [](ncclComm_t raw) {
    auto const comm = nccl_communicator::adopt(raw);
    gather_of_two gather{2};
    if (comm.rank() == 1) return;
    gather(comm);
    std::jthread const other{[&] { comm.abort(); }};
    gather.on.wait();
  });
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("calls of a communicator that does not block return when NCCL has enqueued them, or time out") {
  using namespace std::chrono_literals;
  on_ranks(2, [](ncclComm_t raw) {
    auto const comm = nccl_communicator::adopt(raw, 200ms);
    fake_nccl::set_in_progress(raw, 5);
    gather_of_two gather{2};
    gather(comm);
    comm.batch([&] { gather(comm); });
    comm.synchronize(gather.on);
    CHECK((gather.out.get() == std::vector<float>{1, 2, 1, 2}));
    fake_nccl::set_in_progress(raw, 1 << 30);
    CHECK_THROWS_AS(gather(comm), syncnorm::timeout_error);
    CHECK_THROWS_AS(gather(comm), syncnorm::nccl_error);
    gather.on.wait();
  });
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("ranks that connect in their first collective wait there, for the timeout at most where they do not block") {
  using namespace std::chrono_literals;
  for (bool const blocks : {true, false})
    on_ranks(2, [&](ncclComm_t raw) {
      fake_nccl::set_connecting_lazily(raw, blocks);
      auto const comm = nccl_communicator::adopt(raw);
      gather_of_two gather{2};
      gather(comm);
      comm.batch([&] {
        gather(comm);
        syncnorm::allreduce(comm, gather.in.span(), gather.in.span(), syncnorm::reduce_op::sum, gather.on);
      });
      comm.synchronize(gather.on);
      CHECK((gather.out.get() == std::vector<float>{1, 2, 1, 2}));
      CHECK((gather.in.get() == std::vector<float>{2, 4}));
    });
  for (bool const batched : {false, true}) {
    auto const raw = fake_nccl::make_group(2);
    ncclCommDestroy(raw[1]);
    fake_nccl::set_connecting_lazily(raw[0], false);
    auto const comm = nccl_communicator::adopt(raw[0], 50ms);
    gather_of_two gather{2};
    auto const start = std::chrono::steady_clock::now();
    if (batched)
      CHECK_THROWS_AS(comm.batch([&] { gather(comm); }), syncnorm::timeout_error);
    else
      CHECK_THROWS_AS(gather(comm), syncnorm::timeout_error);
    CHECK(std::chrono::steady_clock::now() - start < 20s);
    CHECK(comm.native_handle() == nullptr);
    gather.on.wait(); // which nothing holds up any more
    CHECK_THROWS_AS(gather(comm), syncnorm::nccl_error);
  }
  CHECK(fake_cuda::noted().empty());
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("a communicator that does not block may still be being made, by a split, too") {
  using namespace std::chrono_literals;
  on_ranks(2, [](ncclComm_t raw) {
    fake_nccl::set_being_made(raw, 5);
    auto const comm = nccl_communicator::adopt(raw, 10s);
    CHECK(comm.size() == 2);
    fake_nccl::set_in_progress(raw, 5);
    auto const part = syncnorm::split(comm, 0, -comm.rank());
    CHECK(part.size() == 2);
    CHECK(part.rank() == 1 - comm.rank());
    gather_of_two gather{2};
    gather(part);
    part.synchronize(gather.on);
    CHECK((gather.out.get() == std::vector<float>{1, 2, 1, 2}));
  });
  auto* const raw = fake_nccl::make_group(1)[0];
  fake_nccl::set_being_made(raw, 1 << 30);
  CHECK_THROWS_AS(nccl_communicator(raw, 50ms), syncnorm::timeout_error);
  ncclCommDestroy(raw);
  CHECK(fake_nccl::alive() == 0);
  CHECK(fake_cuda::noted().empty());
}

TEST_CASE("a split that does not end in time is a timeout, and NCCL may write its communicator afterwards") {
  using namespace std::chrono_literals;
  on_ranks(2, [](ncclComm_t raw) {
    auto const comm = nccl_communicator::adopt(raw, 50ms);
    fake_nccl::set_in_progress(raw, 1 << 30);
    CHECK_THROWS_AS((void)syncnorm::split(comm, 0), syncnorm::timeout_error);
    CHECK_THROWS_AS((void)syncnorm::split(comm, 0), syncnorm::nccl_error);
  });
  CHECK(fake_cuda::noted().empty());
  CHECK(fake_nccl::alive() == 0);
}

TEST_CASE("to wait for a stream leaves the captures of others as they are, by the same thread and by another") {
  auto const comm = nccl_communicator::adopt(fake_nccl::make_group(1)[0]);
  gather_of_two gather{1};
  gather(comm);
  test::stream const other;
  for (bool const same : {true, false}) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal) == cudaSuccess);
    auto const wait = [&] { CHECK_NOTHROW(comm.synchronize(gather.on)); };
    if (same)
      wait();
    else
      std::jthread{wait}.join();
    CHECK(cudaStreamEndCapture(other, &graph) == cudaSuccess);
    cudaGraphDestroy(graph);
  }
}

TEST_CASE("what cannot be made a communicator, and calls that fail") {
  using namespace std::chrono_literals;
  CHECK_THROWS_AS(nccl_communicator{nullptr}, syncnorm::invalid_argument_error);
  auto* const raw = fake_nccl::make_group(1)[0];
  CHECK_THROWS_AS(nccl_communicator(raw, 0ms), syncnorm::invalid_argument_error);
  {
    nccl_communicator const borrowed{raw};
    CHECK_THROWS_AS((void)syncnorm::split(borrowed, -1), syncnorm::invalid_argument_error);
    gather_of_two gather{1};
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(gather.on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_THROWS_AS(borrowed.synchronize(gather.on), syncnorm::cuda_error);
    CHECK_THROWS_AS(borrowed.synchronize(gather.on), syncnorm::cuda_error);
    CHECK(cudaStreamEndCapture(gather.on, &graph) == cudaErrorStreamCaptureInvalidated);
    gather(borrowed); // the capture has failed, and the communicator has not
    fake_cuda::fail_next("ncclAllGather", cudaErrorUnknown);
    CHECK_THROWS_WITH_AS(gather(borrowed), doctest::Contains("nccl: ncclAllGather"), syncnorm::nccl_error);
    CHECK_THROWS_AS(gather(borrowed), syncnorm::nccl_error);
  }
  CHECK(fake_nccl::alive() == 1); // not owned
  ncclCommDestroy(raw);
}

TEST_CASE("what a batch of collectives throws is thrown, and the communicator goes on") {
  auto const comm = nccl_communicator::adopt(fake_nccl::make_group(1)[0]);
  CHECK_THROWS_AS(comm.batch([] { throw std::logic_error{"no more"}; }), std::logic_error);
  comm.batch([] {});
}

TEST_CASE("an error while a stream waits ends what waits there") {
  auto const raw = fake_nccl::make_group(2);
  auto const comm = nccl_communicator::adopt(raw[0], std::chrono::seconds{20});
  gather_of_two gather{2};
  gather(comm);
  fake_nccl::set_async_error(raw[0], ncclRemoteError);
  CHECK_THROWS_AS(comm.synchronize(gather.on), syncnorm::nccl_error);
  CHECK(comm.native_handle() == nullptr);
  comm.abort();
  gather.on.wait();
  ncclCommDestroy(raw[1]);
}
