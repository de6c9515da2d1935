#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include <doctest/doctest.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include "adapters/loopback.hpp"
#include "comm/contract.hpp"
#include "support/processes.hpp"

using namespace std::chrono_literals;
using syncnorm::make_gloo_context;
using syncnorm::make_gloo_store;
using test_support::loopback;

namespace {

int free_port() {
  int const listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error{"no free port"};
  close(listener);
  return ntohs(address.sin_port);
}

/// A server of this test's own, which keeps nothing on disk.
class redis_server {
public:
  redis_server() : port_{free_port()}, process_{fork()} {
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::freopen("/dev/null", "w", stdout);
      auto const port = std::to_string(port_);
      execlp("redis-server", "redis-server", "--port", port.c_str(), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--dir", directory_.path().c_str(), nullptr);
      _exit(127);
    }
    for (auto const last = std::chrono::steady_clock::now() + 20s;;) {
      try {
        static_cast<void>(make_gloo_store(spec()));
        return;
      } catch (syncnorm::gloo_error const&) {
        if (std::chrono::steady_clock::now() > last) throw;
        std::this_thread::sleep_for(5ms);
      }
    }
  }
  redis_server(redis_server const&) = delete;
  redis_server& operator=(redis_server const&) = delete;
  ~redis_server() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  /// Leaves it without an answer to whoever asks.
  void stop() const { kill(process_, SIGSTOP); }
  [[nodiscard]] std::string spec() const { return "redis:127.0.0.1:" + std::to_string(port_); }

private:
  test_support::temporary_directory directory_;
  int port_;
  pid_t process_;
};

} // namespace

TEST_SUITE_BEGIN("redis");

TEST_CASE("processes meet in Redis") {
  redis_server const server;
  // Under one prefix, as nothing of a run is left.
  for (int run = 0; run < 2; ++run)
    test_support::check_passed(test_support::run_processes(3, 60s, [&](int rank) {
      auto const store = make_gloo_store(server.spec());
      syncnorm::gloo_communicator const comm{make_gloo_context(rank, 3, *store, loopback(60s, "run")), 60s};
      contract::check_allgather<float>(comm, 1000, 1);
    }));
  auto const store = make_gloo_store(server.spec());
  for (int attempt = 0; attempt < 2; ++attempt) { // the second finds the registration of the first taken back
    auto const started = std::chrono::steady_clock::now();
    CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, *store, loopback(100ms, "run"))),
                    syncnorm::timeout_error);
    CHECK(std::chrono::steady_clock::now() - started >= 100ms);
  }
  store->set("run/0", {'x'}); // of a run that was killed
  CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, *store, loopback(60s, "run"))), syncnorm::gloo_error);
}

TEST_CASE("a server that does not answer, from the beginning or later, is a timeout") {
  for (auto const answers_for : {0ms, 100ms}) {
    redis_server const server;
    auto const store = make_gloo_store(server.spec());
    std::jthread const stopping{[&] {
      std::this_thread::sleep_for(answers_for);
      server.stop();
    }};
    if (answers_for == 0ms) std::this_thread::sleep_for(50ms);
    CHECK_THROWS_AS(static_cast<void>(make_gloo_context(0, 2, *store, loopback(400ms, "run"))),
                    syncnorm::timeout_error);
  }
}

TEST_CASE("a server that is not there is an error that names it") {
  auto const spec = "redis:127.0.0.1:" + std::to_string(free_port());
  try {
    static_cast<void>(make_gloo_store(spec));
    FAIL("nothing was thrown");
  } catch (syncnorm::gloo_error const& failure) {
    CHECK(std::string{failure.what()}.find(spec) != std::string::npos);
  }
}

TEST_SUITE_END();

/// Gloo forgets its connection to a server that is not there.
// NOLINTNEXTLINE(bugprone-reserved-identifier): LeakSanitizer's name
extern "C" char const* __lsan_default_suppressions() { return "leak:libhiredis.so"; }

int main(int argc, char** argv) {
  auto const asked = std::ranges::find(argv + 1, argv + argc, std::string_view{"--test-suite=redis"}) != argv + argc;
  if (asked && std::system("command -v redis-server > /dev/null") != 0) {
    std::puts("redis-server is not installed: nothing was tested");
    return 77;
  }
  return doctest::Context{argc, argv}.run();
}
