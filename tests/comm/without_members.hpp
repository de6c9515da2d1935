#pragma once

#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/thread_group.hpp>

namespace contract {

/// A handle of some library's, which cannot have members.
struct without_members {
  syncnorm::thread_communicator const* of;
};

} // namespace contract

template <>
struct syncnorm::communicator_traits<contract::without_members> {
  using handle = contract::without_members;

  static int rank(handle const& c) { return c.of->rank(); }
  static int size(handle const& c) { return c.of->size(); }
  template <syncnorm::wire_type T>
  static void allgather(handle const& c, std::span<T const> in, std::span<T> out) {
    c.of->allgather(in, out);
  }
  template <syncnorm::reducible_type T>
  static void allreduce(handle const& c, std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) {
    c.of->allreduce(in, out, op);
  }
};
