#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/signature.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// A communicator that before each collective lets the ranks compare what they are about to do. Where they
/// disagree on the operation, its type, extent, reduction or root, every rank gets a mismatch_error that says
/// who asked for what, rather than a hang or garbage, and may go on with the next operation. It costs one
/// more allgather, of 24 bytes, each time, and starts asynchronous operations only when all ranks have come:
/// it is for finding mistakes. Collectives of a stream it does not have.
template <communicator C>
requires allgathers<C, std::byte>
class checked_communicator {
public:
  /// Collective in the sense that every rank must wrap its communicator at the same point.
  explicit checked_communicator(C inner) : inner_{std::move(inner)} {}

  [[nodiscard]] int rank() const { return syncnorm::rank(inner_); }
  [[nodiscard]] int size() const { return syncnorm::size(inner_); }
  [[nodiscard]] C const& inner() const noexcept { return inner_; }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const requires allgathers<C, T> {
    agree<T>(detail::collective_kind::allgather, in.size());
    syncnorm::allgather(inner_, in, out);
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const requires allreduces<C, T> {
    agree<T>(detail::collective_kind::allreduce, in.size(), op);
    syncnorm::allreduce(inner_, in, out, op);
  }
  template <wire_type T>
  [[nodiscard]] auto allgather_async(std::span<T const> in, std::span<T> out) const requires allgathers_async<C, T> {
    agree<T>(detail::collective_kind::allgather, in.size());
    return syncnorm::allgather_async(inner_, in, out);
  }
  template <reducible_type T>
  [[nodiscard]] auto allreduce_async(std::span<T const> in, std::span<T> out,
                                     reduce_op op) const requires allreduces_async<C, T> {
    agree<T>(detail::collective_kind::allreduce, in.size(), op);
    return syncnorm::allreduce_async(inner_, in, out, op);
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    agree<T>(detail::collective_kind::broadcast, data.size(), reduce_op::sum, root);
    syncnorm::broadcast(inner_, data, root);
  }
  template <wire_type T>
  void scatter(std::span<T const> in, std::span<T> out, int root) const {
    agree<T>(detail::collective_kind::scatter, out.size(), reduce_op::sum, root);
    syncnorm::scatter(inner_, in, out, root);
  }
  template <reducible_type T>
  void reduce(std::span<T const> in, std::span<T> out, int root, reduce_op op) const {
    agree<T>(detail::collective_kind::reduce, in.size(), op, root);
    syncnorm::reduce(inner_, in, out, root, op);
  }
  void barrier() const {
    agree<std::byte>(detail::collective_kind::barrier, 0);
    syncnorm::barrier(inner_);
  }

  [[nodiscard]] auto split(int color, int key) const requires splits<C> {
    agree<std::byte>(detail::collective_kind::split, 0);
    auto part = syncnorm::split(inner_, color, key);
    return checked_communicator<decltype(part)>{std::move(part)};
  }
  [[nodiscard]] double exchange_overhead() const { return syncnorm::exchange_overhead(inner_); }
  [[nodiscard]] exchange_cost cost_of_exchange() const { return syncnorm::cost_of_exchange(inner_); }
  [[nodiscard]] bool overlaps() const { return syncnorm::overlaps(inner_); }
  void abort() const requires aborts<C> { inner_.abort(); }

private:
  template <wire_type T>
  void agree(detail::collective_kind kind, std::size_t extent, reduce_op op = reduce_op::sum, int root = -1) const {
    detail::signature const own{.sequence = (*sequence_)++,
                                .extent = static_cast<std::int64_t>(extent),
                                .root = root,
                                .kind = kind,
                                .type = detail::wire_id_of<T>,
                                .op = op};
    std::vector<detail::signature> all(static_cast<std::size_t>(size()));
    syncnorm::allgather(inner_, std::as_bytes(std::span{&own, 1}), std::as_writable_bytes(std::span{all}));
    auto const mismatch = detail::describe_mismatch(
        size(), [&](int r) -> detail::signature const& { return all[static_cast<std::size_t>(r)]; });
    if (!mismatch.empty()) throw mismatch_error{mismatch};
  }

  C inner_;
  std::shared_ptr<std::int64_t> sequence_ = std::make_shared<std::int64_t>(0); // copies are the same rank
};

} // namespace syncnorm
