#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <gloo/common/error.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/rendezvous/prefix_store.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include "adapters/loopback.hpp"
#include "comm/contract.hpp"
#include "support/message_of.hpp"
#include "support/processes.hpp"

using namespace std::chrono_literals;
using syncnorm::make_gloo_context;
using syncnorm::make_gloo_store;
using test_support::contains, test_support::loopback, test_support::message_of;

namespace {

template <class Body>
void run_threads(int size, Body body) {
  std::vector<std::jthread> ranks;
  for (int r = 0; r < size; ++r) ranks.emplace_back([&, r] { body(r); });
}

} // namespace

TEST_CASE("threads of one process meet in a hash store") {
  auto const store = make_gloo_store("hash");
  run_threads(3, [&](int rank) {
    contract::check_contract(syncnorm::gloo_communicator{make_gloo_context(rank, 3, *store, loopback()), 60s});
  });
  // The default is this host's name, or loopback.
  auto const other = make_gloo_store("hash");
  run_threads(2, [&](int rank) {
    contract::check_allgather<float>(syncnorm::gloo_communicator{make_gloo_context(rank, 2, *other)}, 5, 1);
  });
}

TEST_CASE("Gloo's thread has the policy of those that give way, unless asked not to, and the caller keeps its own") {
  auto const policies = [] { // of this process's threads
    std::map<int, int> all;
    for (auto const& each : std::filesystem::directory_iterator{"/proc/self/task"}) {
      int const thread = std::stoi(each.path().filename().string());
      all[thread] = sched_getscheduler(thread);
    }
    return all;
  };
  int const own = sched_getscheduler(0);
  for (bool const gives_way : {true, false}) {
    auto options = loopback();
    options.thread_gives_way = gives_way;
    auto const store = make_gloo_store("hash");
    std::vector<std::shared_ptr<gloo::Context>> contexts(2);
    auto others = policies();
    std::mutex guard;
    run_threads(2, [&](int rank) {
      {
        std::lock_guard const lock{guard};
        others[::gettid()] = own; // which may be listed a while after its end
      }
      contexts[static_cast<std::size_t>(rank)] = make_gloo_context(rank, 2, *store, options);
      CHECK(sched_getscheduler(0) == own);
    });
    int made = 0;
    for (auto const& [thread, policy] : policies()) {
      if (others.contains(thread)) continue;
      ++made;
      CHECK(policy == (gives_way && own == SCHED_OTHER ? SCHED_BATCH : own));
    }
    CHECK(made == 2);
  }
}

TEST_CASE("a file store is free for the next run") {
  test_support::temporary_directory const parent;
  auto const directory = parent.path() + "/made/on demand";
  test_support::check_passed(test_support::run_processes(3, 60s, [&](int rank) {
    for (int run = 0; run < 3; ++run) {
      auto const store = make_gloo_store("file:" + directory);
      syncnorm::gloo_communicator const comm{make_gloo_context(rank, 3, *store, loopback()), 60s};
      contract::check_allgather<float>(comm, 5, run);
    }
  }));
  CHECK(std::filesystem::is_empty(directory));
}

TEST_CASE("ranks that register under other prefixes do not meet") {
  gloo::rendezvous::HashStore store;
  run_threads(4, [&](int i) {
    auto const context = make_gloo_context(i % 2, 2, store, loopback(60s, i < 2 ? "first" : "second"));
    contract::check_allgather<float>(syncnorm::gloo_communicator{context, 60s}, 5, 1);
  });
}

TEST_CASE("stores that cannot be are refused") {
  for (auto const* spec : {"", "file:", "file", "nfs:/tmp", "redis:", "redis:localhost", "redis:localhost:",
                           "redis::6379", "redis:localhost:port", "redis:localhost:70000", "redis:localhost:63790x"}) {
    INFO(spec);
    CHECK_THROWS_AS(static_cast<void>(make_gloo_store(spec)), syncnorm::invalid_argument_error);
  }
  test_support::temporary_directory const parent;
  auto const file = parent.path() + "/file";
  std::ofstream{file} << "no directory";
  for (auto const& path : {file, file + "/below"}) {
    auto const message = message_of([&] { static_cast<void>(make_gloo_store("file:" + path)); });
    CHECK(contains(message, "file:" + path));
  }
}

TEST_CASE("bad ranks, timeouts, names and interfaces are refused") {
  gloo::rendezvous::HashStore store;
  for (auto const& [rank, size] : {std::pair{-1, 2}, {2, 2}, {0, 0}})
    CHECK_THROWS_AS(static_cast<void>(make_gloo_context(rank, size, store)), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, store, loopback(0ms))), syncnorm::invalid_argument_error);
  auto options = loopback();
  options.hostname = "no such host.invalid";
  CHECK(contains(message_of([&] { static_cast<void>(make_gloo_context(0, 2, store, options)); }),
                 "'no such host.invalid' has no address"));
  options.interface = "nosuch0";
  CHECK(contains(message_of([&] { static_cast<void>(make_gloo_context(0, 2, store, options)); }), "'nosuch0'"));
  CHECK(make_gloo_context(0, 1, store)->size == 1);
}

TEST_CASE("ranks that do not come are named, within the timeout") {
  test_support::temporary_directory const directory;
  auto const files = make_gloo_store("file:" + directory.path());
  gloo::rendezvous::HashStore table;
  gloo::rendezvous::PrefixStore prefixed{"of another", table};
  for (gloo::rendezvous::Store* store : {files.get(), static_cast<gloo::rendezvous::Store*>(&prefixed)}) {
    auto const started = std::chrono::steady_clock::now();
    auto const message = message_of([&] { static_cast<void>(make_gloo_context(2, 4, *store, loopback(150ms))); });
    CHECK(contains(message, "150 ms of ranks 0 to 3 there are missing under prefix 'run': 0, 1, 3"));
    CHECK(std::chrono::steady_clock::now() - started >= 150ms);
    CHECK_THROWS_AS(static_cast<void>(make_gloo_context(1, 4, *store, loopback(50ms))), syncnorm::timeout_error);
  }
}

TEST_CASE("a rank that gave up before is not named beside those that did not come") {
  test_support::temporary_directory const directory;
  auto const files = make_gloo_store("file:" + directory.path());
  run_threads(3, [&](int rank) {
    if (rank == 0) return;
    if (rank == 1) {
      files->wait({"run/2"}, 60s);
      std::this_thread::sleep_for(200ms);
    }
    auto const message = message_of([&] { static_cast<void>(make_gloo_context(rank, 3, *files, loopback(800ms))); });
    CHECK_MESSAGE(message.ends_with("there are missing under prefix 'run': 0"), message);
  });
}

TEST_CASE("a rank that is registered already, or another number of ranks, is an error") {
  test_support::temporary_directory const directory;
  auto const files = make_gloo_store("file:" + directory.path());
  gloo::rendezvous::HashStore table;
  for (gloo::rendezvous::Store* store : {files.get(), static_cast<gloo::rendezvous::Store*>(&table)}) {
    store->set("run/0", std::vector<char>(2 * sizeof(std::int32_t)));
    auto const twice = message_of([&] { static_cast<void>(make_gloo_context(0, 2, *store, loopback(50ms))); });
    CHECK(contains(twice, "rank 0 cannot register under prefix 'run'"));
    run_threads(2, [&](int rank) {
      auto const other = message_of(
          [&] { static_cast<void>(make_gloo_context(rank, rank == 0 ? 2 : 3, *store, loopback(60s, "sizes"))); });
      CHECK(contains(other, rank == 0 ? "rank 1 registered as one of 3 ranks, this rank as one of 2"
                                      : "rank 0 registered as one of 2 ranks, this rank as one of 3"));
    });
  }
}

TEST_CASE("after a timeout the ranks may try again in the same file store") {
  test_support::temporary_directory const directory;
  auto const files = make_gloo_store("file:" + directory.path());
  CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, *files, loopback(50ms))), syncnorm::timeout_error);
  run_threads(2, [&](int rank) { CHECK(make_gloo_context(rank, 2, *files, loopback(60s))->size == 2); });
}

TEST_CASE("a rank that has registered and does not connect is a timeout, after which nothing of the others is left") {
  test_support::temporary_directory const directory;
  auto const files = make_gloo_store("file:" + directory.path());
  auto const device = syncnorm::detail::make_gloo_device(loopback(60s));
  syncnorm::detail::gloo_mesh silent{1, 2, device, 60s};
  files->set("run/1", syncnorm::detail::gloo_card{silent}.bytes());
  CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, *files, loopback(200ms))), syncnorm::timeout_error);
  CHECK_THROWS_AS(files->wait({"run/0"}, 1ms), gloo::IoException);
}

TEST_CASE("what an earlier run left behind is an error in time") {
  test_support::temporary_directory const directory;
  // The ranks of the earlier run are gone, and so is whatever listened at the addresses that they left.
  auto const dead = test_support::run_processes(2, 60s, [&](int rank) {
    auto const store = make_gloo_store("file:" + directory.path());
    std::jthread const killer{[] {
      std::this_thread::sleep_for(50ms);
      _exit(1);
    }};
    if (rank == 0) static_cast<void>(make_gloo_context(0, 3, *store, loopback(60s)));
    std::this_thread::sleep_for(60s);
  });
  CHECK(dead[0].exit_code == 1);
  test_support::check_passed(test_support::run_processes(2, 60s, [&](int i) {
    auto const store = make_gloo_store("file:" + directory.path());
    CHECK_THROWS_AS(static_cast<void>(make_gloo_context(i + 1, 3, *store, loopback(500ms))),
                    syncnorm::communicator_error);
  }));
}
