// A wire that takes its time: hands every packet over between two TUN devices, tun0 and tun1, in two network namespaces,
// so many milliseconds after it was sent. For kernels without netem.
// usage: delayed_wire MILLISECONDS NAMESPACE0 NAMESPACE1; prints "ready" once both devices are open.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;

struct packet {
  clock_type::time_point due;
  std::vector<char> bytes;
};

int require(int result, std::string const& what) {
  if (result < 0) throw std::runtime_error{what + ": " + std::strerror(errno)};
  return result;
}

/// A descriptor stays with the namespace in which it was made.
int open_device(char const* network, char const* name) {
  int const space = require(open(network, O_RDONLY | O_CLOEXEC), network);
  require(setns(space, CLONE_NEWNET), network);
  close(space);
  int const device = require(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  require(ioctl(device, TUNSETIFF, &request), name);
  return device;
}

void arm(int timer, clock_type::time_point due) {
  auto const at = due.time_since_epoch();
  auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(at);
  itimerspec when{};
  when.it_value.tv_sec = seconds.count();
  when.it_value.tv_nsec = std::chrono::nanoseconds{at - seconds}.count();
  require(timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, nullptr), "timerfd_settime");
}

[[noreturn]] void relay(std::array<int, 2> devices, std::chrono::nanoseconds delay) {
  int const timer = require(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK), "timerfd_create");
  std::array<std::deque<packet>, 2> queues; // queues[i]: what device i is to get
  std::array<pollfd, 3> waiting{{{devices[0], POLLIN, 0}, {devices[1], POLLIN, 0}, {timer, POLLIN, 0}}};
  std::vector<char> bytes(1 << 16);
  for (;;) {
    auto next = clock_type::time_point::max();
    for (auto const& queue : queues)
      if (!queue.empty()) next = std::min(next, queue.front().due);
    if (next != clock_type::time_point::max()) arm(timer, next);
    if (poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) require(-1, "poll");
    for (std::size_t i = 0; i < 2; ++i) {
      ssize_t got = 0;
      while ((got = read(devices[i], bytes.data(), bytes.size())) > 0)
        queues[1 - i].push_back({clock_type::now() + delay, {bytes.begin(), bytes.begin() + got}});
    }
    std::uint64_t expired = 0;
    [[maybe_unused]] auto const ignored = read(timer, &expired, sizeof expired);
    auto const now = clock_type::now();
    for (std::size_t i = 0; i < 2; ++i)
      for (; !queues[i].empty() && queues[i].front().due <= now; queues[i].pop_front()) {
        auto const& sent = queues[i].front().bytes;
        // A packet that the device refuses is lost, as on any wire.
        [[maybe_unused]] auto const written = write(devices[i], sent.data(), sent.size());
      }
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: delayed_wire MILLISECONDS NAMESPACE0 NAMESPACE1\n", stderr);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL); // whoever started it may be killed
  try {
    std::array<int, 2> const devices{open_device(argv[2], "tun0"), open_device(argv[3], "tun1")};
    std::puts("ready");
    std::fflush(stdout);
    relay(devices, std::chrono::nanoseconds{static_cast<std::int64_t>(std::atof(argv[1]) * 1e6)});
  } catch (std::exception const& error) {
    std::fprintf(stderr, "delayed_wire: %s\n", error.what());
    return 1;
  }
}
