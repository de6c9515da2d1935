// Two processes, whose communicator is written here, normalize the two halves of a batch, and get what one process gets of
// the whole.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <syncnorm/syncnorm.hpp>

// A communicator of one's own: two processes at the two ends of a stream socket. Batch norm needs no more than this.
class pair_communicator {
public:
  pair_communicator(int rank, int socket) : rank_{rank}, socket_{socket} {
    timeval const patience{60, 0};
    for (int const direction : {SO_RCVTIMEO, SO_SNDTIMEO})
      setsockopt(socket, SOL_SOCKET, direction, &patience, sizeof patience);
  }

  int rank() const { return rank_; }
  int size() const { return 2; }

  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    auto const mine = out.subspan(in.size() * static_cast<std::size_t>(rank_), in.size());
    auto const theirs = out.subspan(in.size() * static_cast<std::size_t>(1 - rank_), in.size());
    if (in.data() != mine.data()) std::ranges::copy(in, mine.begin());
    for (int sender = 0; sender < 2; ++sender)
      if (sender == rank_)
        transfer(std::as_bytes(in), [](auto... to) { return send(to..., MSG_NOSIGNAL); });
      else
        transfer(std::as_writable_bytes(theirs), [](auto... to) { return recv(to..., 0); });
  }

private:
  template <class Bytes, class Call>
  void transfer(Bytes bytes, Call call) const {
    while (!bytes.empty()) {
      auto const moved = call(socket_, bytes.data(), bytes.size());
      if (moved <= 0) throw syncnorm::communicator_error{"pair", "the other end is gone, or late", errno};
      bytes = bytes.subspan(static_cast<std::size_t>(moved));
    }
  }

  int rank_, socket_;
};

namespace {

constexpr std::int64_t channels = 2, spatial = 3;
using tensor = std::array<double, 4 * channels * spatial>;

struct result {
  tensor y{}, dx{};
};

template <syncnorm::communicator C>
result step(C const& comm, double const* x, double const* dy, std::int64_t samples) {
  syncnorm::host::serial_executor const exec;
  result r;
  auto const saved = syncnorm::batch_norm_forward<double>(exec, comm, syncnorm::nchw(x, samples, channels, spatial),
                                                          syncnorm::nchw(r.y.data(), samples, channels, spatial));
  syncnorm::batch_norm_backward<double const>(exec, comm, syncnorm::nchw(dy, samples, channels, spatial),
                                              syncnorm::nchw(x, samples, channels, spatial),
                                              syncnorm::nchw(r.dx.data(), samples, channels, spatial), {}, saved);
  return r;
}

bool agrees(result const& part, result const& whole, std::size_t first, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i)
    if (!(std::abs(part.y[i] - whole.y[first + i]) < 1e-12 && std::abs(part.dx[i] - whole.dx[first + i]) < 1e-12))
      return false;
  return true;
}

} // namespace

int main() {
  tensor x{}, dy{};
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<double>(i * i % 17);
    dy[i] = static_cast<double>(i * 5 % 7);
  }
  result const whole = step(syncnorm::self_communicator{}, x.data(), dy.data(), 4);

  std::array<int, 2> sockets{};
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()) != 0) return 2;
  pid_t const child = fork();
  if (child < 0) return 2;
  int const rank = child == 0 ? 1 : 0;
  // Three samples on rank 0, one on rank 1.
  std::size_t const first = rank == 0 ? 0 : 18, length = rank == 0 ? 18 : 6;
  close(sockets[static_cast<std::size_t>(1 - rank)]);
  pair_communicator const comm{rank, sockets[static_cast<std::size_t>(rank)]};
  bool ok = agrees(step(comm, x.data() + first, dy.data() + first, rank == 0 ? 3 : 1), whole, first, length);
  if (rank == 0) {
    int status = 0;
    waitpid(child, &status, 0);
    ok = ok && status == 0;
    std::puts(ok ? "the two halves agree with the whole" : "the halves differ from the whole");
    ok = std::fflush(stdout) == 0 && ok;
  }
  return ok ? 0 : 1;
}
