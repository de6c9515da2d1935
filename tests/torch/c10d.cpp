#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "support.hpp"

#include <syncnorm/adapters/c10d.hpp>
#include <syncnorm/torch/convert.hpp>

#include <comm/contract.hpp>
#include <ops/over_processes.hpp>
#include <support/processes.hpp>

using namespace std::chrono_literals;
using namespace test;
using syncnorm::c10d_communicator;

namespace {

/// Whether Gloo's connections outlive an operation that has timed out; those of libtorch 2 close.
constexpr bool group_outlives_timeouts = TORCH_VERSION_MAJOR < 2;

using group_ptr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

group_ptr make_group(c10::intrusive_ptr<c10d::Store> const& store, int rank, int size,
                     std::chrono::milliseconds timeout = 60s) {
  auto const options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

/// Calls body(group) on `size` threads, each with its own rank's process group.
void run_group(int size, std::function<void(group_ptr)> const& body, std::chrono::milliseconds timeout = 60s) {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(make_group(store, rank, size, timeout));
      } catch (std::exception const& e) {
        FAIL_CHECK("rank " << rank << " threw: " << std::string{e.what()});
      }
    });
}

/// One step of a converted model against the same model on the whole batch. The last rank has no sample, where there
/// are several.
void check_model(c10d_communicator const& comm, Tensor const& x, Tensor const& dy) {
  auto const make_model = [] {
    torch::manual_seed(32);
    return torch::nn::Sequential{torch::nn::BatchNorm2d{2}, torch::nn::Conv2d{torch::nn::Conv2dOptions(2, 3, 3)},
                                 torch::nn::BatchNorm2d{3}};
  };
  auto model = make_model(), whole = make_model();
  syncnorm::torch::convert_sync_batchnorm(model.ptr(), comm);
  auto const part = [&](Tensor const& of_all) {
    auto const share = (of_all.size(0) + comm.size() - 1) / std::max(comm.size() - 1, 1);
    return of_all.slice(0, comm.rank() * share, (comm.rank() + 1) * share);
  };
  auto const own = part(x).clone().requires_grad_(), all = x.clone().requires_grad_();
  auto const y = model->forward(own), expected = whole->forward(all);
  y.backward(part(dy));
  expected.backward(dy);
  CHECK(error_of(y, part(expected), scale_of(expected)) <= 1e-5);
  CHECK(error_of(own.grad(), part(all.grad()), scale_of(all.grad())) <= 1e-5);
  auto const state = model->buffers(), expected_state = whole->buffers();
  for (std::size_t i = 0; i < state.size(); ++i) CHECK(error_of(state[i], expected_state[i], 1) <= 1e-5);
}

} // namespace

// First, because they fork: no other thread may run then.
TEST_CASE("over processes: the contract, the grid, and a model as one process trains it") {
  torch::manual_seed(31);
  auto const x = torch::randn({14, 2, 5, 5}), dy = torch::randn({14, 3, 3, 3});
  for (int const size : {1, 2, 3, 4, 7}) {
    auto const check_batch_norm = batch_norm_check(size); // before there are processes
    test_support::temporary_directory const directory;
    test_support::check_passed(test_support::run_processes(size, 120s, [&](int rank) {
      auto const store = c10::make_intrusive<c10d::FileStore>(directory.path() + "/store", size);
      c10d_communicator const comm{make_group(store, rank, size)};
      if (size == 3) contract::check_contract(comm);
      check_batch_norm(comm);
      check_model(comm, x, dy);
      if (size == 3) check_power_norm_layouts(comm);
      syncnorm::barrier(comm);
    }));
  }
}

TEST_CASE("over processes: a peer that dies is an error of the others, and no signal that ends them") {
  for (bool const handled : {false, true}) {
    test_support::temporary_directory const directory;
    auto const outcomes = test_support::run_processes(3, 120s, [&](int rank) {
      std::signal(SIGPIPE, handled ? [](int) {} : SIG_DFL);
      auto const store = c10::make_intrusive<c10d::FileStore>(directory.path() + "/store", 3);
      c10d_communicator const comm{make_group(store, rank, 3)};
      struct sigaction action {};
      REQUIRE(sigaction(SIGPIPE, nullptr, &action) == 0);
      CHECK((action.sa_handler == SIG_IGN) != handled); // a handler of the program's own stays
      std::vector<float> data(1 << 20, 1);
      syncnorm::barrier(comm);
      if (rank == 1) std::raise(SIGKILL);
      auto const collectives = [&] {
        for (;;) syncnorm::allreduce(comm, std::span<float const>{data}, std::span{data});
      };
      CHECK_THROWS_AS(collectives(), syncnorm::communicator_error);
    });
    CHECK(outcomes[1].signal == SIGKILL);
    test_support::check_passed({outcomes[0], outcomes[2]});
  }
}

TEST_CASE("a late peer is a timeout, after which the communicator is unusable and the group's other users are not") {
  std::latch given_up{1};
  run_group(2, [&](group_ptr const& group) {
    c10d_communicator const patient{group}, other = patient;
    c10d_communicator const hasty{group, 200ms};
    std::vector<float> data(5, 1);
    if (group->getRank() == 0) {
      auto const text = message_of<syncnorm::timeout_error>(
          [&] { syncnorm::allreduce(hasty, std::span<float const>{data}, std::span{data}); });
      CHECK_MESSAGE((contains(text, "c10d: allreduce failed on rank 0 of 2") && contains(text, "imed out")), text);
      CHECK(data == std::vector<float>(5, 1));
      auto const after = message_of<syncnorm::communicator_error>([&] { syncnorm::barrier(hasty); });
      CHECK_MESSAGE(contains(after, "the communicator cannot be used any more: allreduce failed on rank 0 of 2"),
                    after);
      auto const polled = message_of<syncnorm::timeout_error>([&] {
        c10d_communicator const polling{group, 50ms};
        auto work = syncnorm::allreduce_async(polling, std::span<float const>{data}, std::span{data});
        while (!work.test()) std::this_thread::yield();
      });
      CHECK_MESSAGE((contains(polled, "imed out") || contains(polled, "imeout")), polled);
      given_up.count_down();
    } else if (!group_outlives_timeouts) {
      given_up.wait();
      CHECK_THROWS_AS(syncnorm::barrier(patient), syncnorm::communicator_error);
    } else {
      // Late, it joins what the other rank has given up, and so lets the group go on.
      given_up.wait();
      std::vector<float> out(5);
      for (int i = 0; i < 2; ++i) syncnorm::allreduce(patient, std::span<float const>{data}, std::span{out});
      CHECK(out == std::vector<float>(5, 2));
    }
    if (group_outlives_timeouts) contract::check_allgather<std::int64_t>(other, 17, 1);
    CHECK(other.group() == patient.group());
  });
}

TEST_CASE("operations in flight behind one that has failed are not waited for") {
  std::latch given_up{1};
  run_group(2, [&](group_ptr const& group) {
    std::vector<float> data(5, 1), out(5, 7);
    constexpr int in_flight = 4;
    if (group->getRank() == 0) {
      c10d_communicator const hasty{group, 200ms};
      std::vector<syncnorm::c10d_work> works;
      for (int i = 0; i < in_flight; ++i)
        works.push_back(syncnorm::allreduce_async(hasty, std::span<float const>{data}, std::span{out}));
      CHECK_THROWS_AS(works[0].wait(), syncnorm::timeout_error);
      // Each by itself would time out.
      for (auto const& text : {message_of<syncnorm::communicator_error>([&] { works[1].wait(); }),
                               message_of<syncnorm::communicator_error>([&] { works[2].test(); })})
        CHECK_MESSAGE(
            (contains(text, "cannot be used any more") || (!group_outlives_timeouts && contains(text, "pair closure"))),
            text);
      CHECK_THROWS_AS(works[0].wait(), syncnorm::timeout_error); // whenever it is asked
      CHECK_THROWS_AS((void)works[0].test(), syncnorm::timeout_error);
      works.clear();
      CHECK(out == std::vector<float>(5, 7));
      given_up.count_down();
    } else {
      given_up.wait();
      c10d_communicator const patient{group};
      for (int i = 0; group_outlives_timeouts && i < in_flight; ++i)
        syncnorm::allreduce(patient, std::span<float const>{data}, std::span{out});
    }
  });
}

TEST_CASE("collectives of other lengths or kinds than the others' are an error on every rank, and data of any length "
          "arrives") {
  using collective = std::function<void(c10d_communicator const&)>;
  auto const gathers = [](std::size_t n) {
    return collective{[n](c10d_communicator const& comm) {
      std::vector<double> const in(n, comm.rank());
      std::vector<double> out(3 * n);
      comm.allgather(std::span{in}, std::span{out});
    }};
  };
  auto const reduces = [](std::size_t n) {
    return collective{[n](c10d_communicator const& comm) {
      std::vector<double> const in(n, comm.rank());
      std::vector<double> out(n);
      comm.allreduce(std::span{in}, std::span{out}, syncnorm::reduce_op::sum);
    }};
  };
  // Of some of these a backend would end the process.
  std::vector<std::array<collective, 3>> const disagreements{{gathers(8), gathers(900), gathers(8)},
                                                             {gathers(6000), gathers(7000), gathers(20000)},
                                                             {reduces(8), reduces(9000), reduces(9)},
                                                             {reduces(20000), gathers(20000), gathers(20000)},
                                                             {gathers(0), gathers(1), gathers(0)}};
  for (auto const& each : disagreements)
    run_group(
        3,
        [&](group_ptr const& group) {
          c10d_communicator const comm{group};
          auto const rank = static_cast<std::size_t>(comm.rank());
          gathers(5)(comm);
          auto const text = message_of<syncnorm::mismatch_error>([&] { each[rank](comm); });
          CHECK_MESSAGE(text.find("ranks disagree on collective 1: ") != std::string::npos, text);
          // The communicator and other users of the group go on.
          gathers(5)(comm);
          std::vector<Tensor> ones{torch::ones({20'000})};
          group->allreduce(ones)->wait();
          CHECK(ones[0].eq(3).all().item<bool>());
          gathers(20'000)(c10d_communicator{group});
        },
        2s);
  auto const exchange = [](group_ptr const& group, std::vector<std::size_t> const& lengths) {
    c10d_communicator const comm{group};
    auto const rank = comm.rank(), ranks = comm.size();
    auto const each = static_cast<std::size_t>(ranks);
    for (auto const n : lengths) {
      CAPTURE(n);
      std::vector<float> in(n), all(each * n), sum(n), most(n), from_last(n);
      for (std::size_t i = 0; i < n; ++i) in[i] = static_cast<float>(i % 1000) + static_cast<float>(rank);
      comm.allgather(std::span<float const>{in}, std::span{all});
      comm.allreduce(std::span<float const>{in}, std::span{sum}, syncnorm::reduce_op::sum);
      comm.allreduce(std::span<float const>{in}, std::span{most}, syncnorm::reduce_op::max);
      from_last = in;
      comm.broadcast(std::span{from_last}, ranks - 1);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < n; ++i) {
        auto const value = static_cast<float>(i % 1000), last = value + static_cast<float>(ranks - 1);
        for (std::size_t r = 0; r < each; ++r) wrong += all[r * n + i] != value + static_cast<float>(r);
        wrong += sum[i] != static_cast<float>(ranks) * (value + last) / 2;
        wrong += most[i] != last;
        wrong += from_last[i] != last;
      }
      CHECK(wrong == 0);
    }
  };
  // 36824 bytes fit the first message of few ranks, and of 17 ranks 4056.
  run_group(3, [&](group_ptr const& group) { exchange(group, {0, 1, 9206, 9207, 200'000}); });
  run_group(17, [&](group_ptr const& group) { exchange(group, {1014, 1015, 9207}); });
}

TEST_CASE("the group's own timeout and a lost peer are errors of syncnorm") {
  std::latch connected{2}; // a rank that is lost before is one that the other's group cannot be made with
  run_group(
      2,
      [&](group_ptr const& group) {
        connected.arrive_and_wait();
        if (group->getRank() == 1) return;
        c10d_communicator const comm{group};
        std::vector<double> data(5);
        CHECK_THROWS_AS(syncnorm::allgather(comm, std::span<double const>{data}.first(1), std::span{data}.first(2)),
                        syncnorm::communicator_error);
      },
      300ms);
}

TEST_CASE("a model over c10d hears of a lost peer as an error, and keeps its state") {
  run_group(2, [](group_ptr const& group) {
    SyncBatchNorm norm{BatchNormOptions{3}, c10d_communicator{group, 2s}};
    norm->forward(torch::arange(6).to(torch::kFloat).view({2, 3}));
    if (group->getRank() == 1) return;
    auto const before = state_of(*norm);
    CHECK_THROWS_AS(norm->forward(torch::ones({2, 3})), syncnorm::communicator_error);
    CHECK(same_state(before, state_of(*norm)));
  });
}

TEST_CASE("null groups and timeouts that are none") {
  CHECK_THROWS_AS(c10d_communicator{group_ptr{}}, syncnorm::invalid_argument_error);
  auto const alone = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  CHECK_THROWS_AS((c10d_communicator{alone, 0ms}), syncnorm::invalid_argument_error);
  contract::check_contract(c10d_communicator{alone});
}
