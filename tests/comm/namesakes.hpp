#pragma once

#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/thread_group.hpp>

/// A namespace whose functions have the names of syncnorm's, and are not to be called by it.
namespace namesakes {

/// Threads as a user's type, with what passes may ask of a communicator.
class communicator {
public:
  explicit communicator(syncnorm::thread_communicator const& of) : threads_{of} {}

  [[nodiscard]] int rank() const { return threads_.rank(); }
  [[nodiscard]] int size() const { return threads_.size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    threads_.allgather(in, out);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    threads_.allreduce(in, out, op);
  }
  template <syncnorm::wire_type T>
  [[nodiscard]] auto allgather_async(std::span<T const> in, std::span<T> out) const {
    return threads_.allgather_async(in, out);
  }
  template <syncnorm::reducible_type T>
  [[nodiscard]] auto allreduce_async(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    return threads_.allreduce_async(in, out, op);
  }
  [[nodiscard]] double exchange_overhead() const { return 0; }

private:
  syncnorm::thread_communicator threads_;
};

void rank(communicator const&) = delete;
void size(communicator const&) = delete;
void overlaps(communicator const&) = delete;
void exchange_overhead(communicator const&) = delete;
void cost_of_exchange(communicator const&) = delete;
void check(communicator const&) = delete;
void allgather(communicator const&, auto&&...) = delete;
void allreduce(communicator const&, auto&&...) = delete;
void allgather_async(communicator const&, auto&&...) = delete;
void allreduce_async(communicator const&, auto&&...) = delete;
void barrier(communicator const&) = delete;
void broadcast(communicator const&, auto&&...) = delete;
void scatter(communicator const&, auto&&...) = delete;
void reduce(communicator const&, auto&&...) = delete;
void split(communicator const&, auto&&...) = delete;

} // namespace namesakes
