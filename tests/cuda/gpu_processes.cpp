#include <syncnorm/adapters/nccl.hpp>

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/ops/cuda_batch_norm_layer.hpp>

#include "cuda/layer_cases.hpp"
#include "cuda/pending_cases.hpp"
#include "cuda/stream_contract.hpp"
#include "support/message_of.hpp"
#include "support/processes.hpp"

// Ranks of NCCL that are processes, on as many GPUs as there are, where a GPU may have several. CUDA is initialized in the processes alone,
// as one that has done so cannot fork them.
namespace {

using namespace std::chrono_literals;
using comm_type = syncnorm::nccl_communicator;
template <class T>
using layer_over =
    syncnorm::cuda::basic_batch_norm<T, comm_type, syncnorm::accumulate_t<T>, syncnorm::cuda::compiled_kernels>;

void require(ncclResult_t code, char const* call) {
  if (code != ncclSuccess && code != ncclInProgress) throw syncnorm::nccl_error{call, code};
}

/// Memory of all processes that are forked while it lives.
class meeting_point {
public:
  meeting_point() {
    void* const memory = mmap(nullptr, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    shared_ = new (memory) shared;
  }
  meeting_point(meeting_point const&) = delete;
  meeting_point& operator=(meeting_point const&) = delete;
  ~meeting_point() { munmap(shared_, sizeof(shared)); }

  /// The id that rank 0 makes.
  [[nodiscard]] ncclUniqueId id(int rank) const {
    if (rank == 0) {
      require(ncclGetUniqueId(&shared_->id), "ncclGetUniqueId");
      shared_->has_id = true;
    }
    wait_until([&] { return shared_->has_id.load(); });
    return shared_->id;
  }
  void arrive() const { ++shared_->arrived; }
  void wait_for(int ranks) const {
    wait_until([&] { return shared_->arrived >= ranks; });
  }

private:
  struct shared {
    std::atomic<bool> has_id = false;
    std::atomic<int> arrived = 0;
    ncclUniqueId id{};
  };

  template <class F>
  static void wait_until(F const& f) {
    while (!f()) std::this_thread::sleep_for(1ms);
  }

  shared* shared_;
};

struct rank_options {
  bool blocking = true;
  std::chrono::milliseconds timeout = 60s;
};

/// f(comm, others) in a process for each rank. NCCL refuses a second rank on a GPU of one host; where there are too few, each rank
/// says that it is a host of its own, and they connect by sockets.
std::vector<test_support::process_outcome>
over_processes(int ranks, rank_options const& options,
               std::function<void(comm_type const&, meeting_point const&)> const& f) {
  meeting_point const others;
  return test_support::run_processes(ranks, 300s, [&](int rank) {
    int devices = 0;
    syncnorm::detail::require_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    syncnorm::detail::require_cuda(cudaSetDevice(rank % devices), "cudaSetDevice");
    if (ranks > devices) setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = options.blocking ? 1 : 0;
    ncclComm_t comm = nullptr;
    require(ncclCommInitRankConfig(&comm, ranks, others.id(rank), rank, &config), "ncclCommInitRankConfig");
    f(comm_type::adopt(comm, options.timeout), others);
  });
}

void check_over_processes(int ranks, rank_options const& options, std::function<void(comm_type const&)> const& f) {
  test_support::check_passed(over_processes(ranks, options, [&](auto const& comm, auto const&) { f(comm); }));
}

/// A layer, and what its forward passes need.
struct forward_case {
  layer_over<float> layer;
  test::stream on;
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, y{test::layout::nchw, 2, 3, 5};

  explicit forward_case(comm_type const& comm) : layer{comm, 3} {}
  void pass() { pass_of(x.view); }
  void pass_of(syncnorm::tensor_view<float> const& input) {
    layer.forward(input, y.view, on);
    layer.synchronize(on);
  }
};

} // namespace

TEST_CASE("processes over NCCL keep the contract of streams") {
  for (int const ranks : {1, 3})
    check_over_processes(ranks, {}, [](auto const& comm) {
      for (bool const captured : {false, true}) stream_contract::check_contract(comm, captured);
      stream_contract::check_contract(syncnorm::split(comm, comm.rank() % 2), true);
    });
  check_over_processes(2, {.blocking = false}, [](auto const& comm) { stream_contract::check_contract(comm, false); });
}

TEST_CASE("processes over NCCL agree with the oracle, enqueued and replayed") {
  for (int const ranks : {1, 2, 3})
    check_over_processes(ranks, {}, [](auto const& comm) {
      for (bool const captured : {false, true}) {
        layer_cases::check_cases<layer_over<float>>(comm, captured);
        layer_cases::check_cases<layer_over<__half>, __half>(comm, captured);
        for (auto of : layer_cases::cases()) {
          of.policy = syncnorm::exchange_policy::reduce;
          layer_cases::check_steps<layer_over<float>>(comm, of, captured);
        }
        layer_cases::check_two_phases<layer_over<float>>(comm, captured, [] {});
        layer_cases::check_group<layer_over<float>>(comm, captured);
      }
    });
}

TEST_CASE("what is wrong in one process over NCCL is an error in every process, and nothing is written") {
  check_over_processes(2, {}, [](auto const& comm) {
    forward_case of{comm};
    for (bool const first : {true, false}) {
      if (!first) of.pass();
      auto const before = of.y.get();
      auto view = of.x.view;
      if (comm.rank() == 1) view.data = of.x.host.storage.data();
      auto const said = test_support::message_of<syncnorm::invalid_argument_error>([&] { of.pass_of(view); });
      INFO(said);
      CHECK(test_support::contains(said, "batch_norm forward: rank 1: x is memory of the host, expected of device "));
      CHECK(of.y.get() == before);
    }
    of.pass();
  });
}

TEST_CASE("a process over NCCL that stays away ends the passes of the others after their timeout") {
  for (bool const blocking : {true, false})
    test_support::check_passed(
        over_processes(2, {.blocking = blocking, .timeout = 3s}, [&](auto const& comm, auto const& others) {
          forward_case of{comm};
          if (blocking) of.pass(), of.pass(); // where NCCL blocks, ranks connect in passes of all
          if (comm.rank() == 1) return others.wait_for(1);
          auto const start = std::chrono::steady_clock::now();
          auto const said = test_support::message_of<syncnorm::timeout_error>([&] { of.pass(); });
          CHECK(test_support::contains(said, "3000 ms"));
          CHECK(std::chrono::steady_clock::now() - start < 10s);
          of.on.wait();
          CHECK(test_support::contains(test_support::message_of<syncnorm::nccl_error>([&] { of.pass(); }),
                                       "cannot be used any more"));
          others.arrive();
        }));
}

TEST_CASE("a process over NCCL that dies ends the passes of the others") {
  auto const outcomes = over_processes(3, {.timeout = 10s}, [](auto const& comm, auto const&) {
    forward_case of{comm};
    of.pass(), of.pass();
    if (comm.rank() == 1) std::raise(SIGKILL);
    CHECK(test_support::contains(test_support::message_of<syncnorm::nccl_error>([&] { of.pass(); }), "nccl: "));
    of.on.wait();
    CHECK(test_support::contains(test_support::message_of<syncnorm::nccl_error>([&] { of.pass(); }),
                                 "cannot be used any more"));
  });
  CHECK(outcomes[1].signal == SIGKILL);
  test_support::check_passed({outcomes[0], outcomes[2]});
}
