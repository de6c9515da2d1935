#pragma once

#include <span>
#include <utility>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/thread_group.hpp>

namespace contract {

/// A rank of a thread group that counts its collectives, which all block.
class counted {
public:
  counted(syncnorm::thread_communicator comm, int& calls) : comm_{std::move(comm)}, calls_{&calls} {}

  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    ++*calls_;
    comm_.allgather(in, out);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    ++*calls_;
    comm_.allreduce(in, out, op);
  }

private:
  syncnorm::thread_communicator comm_;
  int* calls_;
};

} // namespace contract
