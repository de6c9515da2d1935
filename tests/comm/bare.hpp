#pragma once

#include <span>
#include <utility>

#include <syncnorm/comm/communicator.hpp>

namespace contract {

/// The least that a communicator can be: what `C` has beyond it is hidden.
template <class C>
class bare {
public:
  explicit bare(C inner) : inner_{std::move(inner)} {}

  [[nodiscard]] int rank() const { return syncnorm::rank(inner_); }
  [[nodiscard]] int size() const { return syncnorm::size(inner_); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    syncnorm::allgather(inner_, in, out);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    syncnorm::allreduce(inner_, in, out, op);
  }

private:
  C inner_;
};

} // namespace contract
