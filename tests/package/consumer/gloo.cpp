// Two threads, each a rank of a Gloo context that they meet through a store in memory.

#include <cstdint>
#include <cstdio>
#include <span>
#include <thread>

#include <syncnorm/adapters/gloo_context.hpp>

namespace {

std::int64_t sum_of_ranks(int rank, gloo::rendezvous::Store& store) {
  syncnorm::gloo_communicator const comm{
      syncnorm::make_gloo_context(rank, 2, store, {.hostname = "127.0.0.1", .timeout = std::chrono::seconds{30}})};
  std::int64_t value = comm.rank() + 1;
  syncnorm::allreduce(comm, std::span{&value, 1}, std::span{&value, 1});
  return value;
}

} // namespace

int main() {
  auto const store = syncnorm::make_gloo_store("hash");
  std::int64_t sums[2] = {};
  std::thread other{[&] { sums[1] = sum_of_ranks(1, *store); }};
  sums[0] = sum_of_ranks(0, *store);
  other.join();
  std::printf("sums over the ranks: %d and %d\n", static_cast<int>(sums[0]), static_cast<int>(sums[1]));
  return sums[0] == 3 && sums[1] == 3 ? 0 : 1;
}
