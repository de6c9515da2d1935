#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <syncnorm/adapters/detail/broken_pipe.hpp>
#include <syncnorm/adapters/detail/c10d_operation.hpp>
#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/rank_order.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/kept_failure.hpp>
#include <syncnorm/comm/detail/require_rank.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// An operation in flight in a process group. Its timeout counts from the first call of `test` or `wait`. Where an earlier one has
/// failed, nobody waits for it any more.
class c10d_work {
public:
  c10d_work() = default;
  c10d_work(c10d_work&&) = default;
  c10d_work& operator=(c10d_work&& other) noexcept {
    if (this != &other) {
      drop();
      operation_ = std::move(other.operation_);
      failure_ = std::move(other.failure_);
    }
    return *this;
  }
  ~c10d_work() { drop(); }

  /// Whether the operation has completed. Throws what failed, a timeout too.
  bool test() {
    if (!operation_) {
      failure_.tell();
      return true;
    }
    if (operation_->in_flight() && !operation_->state->failure.has_happened() && operation_->remaining().count() > 0)
      return false;
    wait();
    return true;
  }

  /// Blocks until the operation has completed. Throws what failed.
  void wait() {
    if (!operation_) return failure_.tell();
    // Released first, so that this handle is done whether or not the wait throws.
    auto const operation = std::exchange(operation_, {});
    failure_.keep([&] {
      if (operation->in_flight()) operation->state->require_usable(operation->name);
      operation->finish();
    });
  }

private:
  friend class c10d_communicator;
  explicit c10d_work(std::unique_ptr<detail::c10d_operation> operation) : operation_{std::move(operation)} {}

  void drop() noexcept {
    try {
      wait();
    } catch (...) { // nobody is left to hear of it
    }
  }

  std::unique_ptr<detail::c10d_operation> operation_;
  detail::kept_failure failure_;
};

/// The ranks of a c10d process group, by its backend for CPU tensors (Gloo, MPI). It shares the ownership of the group,
/// like any other user of one. It has no `split`: make a process group of the ranks instead.
///
/// Data crosses in tensors of the adapter's own, which the backend keeps alive: an operation that has timed out here may
/// still be running there, when the caller's buffers are gone. `timeout` bounds the wait for each operation; a shorter
/// one of the group's own wins, and for a longer one Gloo's group, when it is destroyed, waits for what has timed out here. After a
/// timeout Gloo's group goes on when the late rank joins what it missed; that of libtorch 2 has closed its connections.
/// What ranks do is compared before data of more than 36 KiB, or of 4 KiB for more than 16 ranks, are exchanged; their asynchronous
/// collectives wait for that when they are begun. So ranks whose collectives differ all get a mismatch_error, and the group goes on:
/// of messages of different lengths a process group of Gloo ends the process (libtorch 1.13).
/// A process whose SIGPIPE has the default action ignores it from here on, because a backend's writing to a dead peer
/// would otherwise end the process.
class c10d_communicator {
public:
  /// `group`: a `ProcessGroup`, or, since libtorch 2, a `Backend`, as `ProcessGroupGloo` then is. Throws invalid_argument_error
  /// where it is null or timeout ≤ 0.
  template <class Group>
  explicit c10d_communicator(c10::intrusive_ptr<Group> group, std::chrono::milliseconds timeout = default_timeout)
      : state_{std::make_shared<detail::c10d_state>()} {
    if (!group) throw invalid_argument_error{"c10d_communicator: the process group is null"};
    state_->timeout = detail::checked_timeout("c10d_communicator", timeout);
    if (group->getSize() > 1) detail::ignore_broken_pipes();
    state_->backend = group->getBackendName();
    state_->group = detail::process_group_of(std::move(group));
  }

  [[nodiscard]] int rank() const noexcept { return state_->group->getRank(); }
  [[nodiscard]] int size() const noexcept { return state_->group->getSize(); }
  [[nodiscard]] c10::intrusive_ptr<::c10d::ProcessGroup> const& group() const noexcept { return state_->group; }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    allgather_async(in, out).wait();
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    allreduce_async(in, out, op).wait();
  }

  template <wire_type T>
  [[nodiscard]] c10d_work allgather_async(std::span<T const> in, std::span<T> out) const {
    using operation = detail::c10d_operation;
    return start("allgather", detail::make_header<T>(detail::collective_kind::allgather, in.size()), in, out,
                 [&](operation& of, std::byte const* data) {
                   auto const first = std::min(of.bytes, of.room());
                   of.begin(data, first);
                   if (first < of.bytes) {
                     of.agree();
                     of.rest = of.gather(operation::copy_of(data + first, of.bytes - first));
                   }
                   of.take = [](operation const& done) {
                     auto const some = std::min(done.bytes, done.room()), more = done.bytes - some;
                     for (std::size_t r = 0; r < done.ranks(); ++r) {
                       std::byte* const to = done.out + r * done.bytes;
                       detail::copy_bytes(to, done.data_of(r), some);
                       if (more != 0)
                         detail::copy_bytes(to + some, static_cast<std::byte const*>(done.rest.data_ptr()) + r * more,
                                            more);
                     }
                   };
                 });
  }
  template <reducible_type T>
  [[nodiscard]] c10d_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    using operation = detail::c10d_operation;
    return start("allreduce", detail::make_header<T>(detail::collective_kind::allreduce, in.size(), -1, op), in, out,
                 [&](operation& of, std::byte const* data) {
                   if (of.bytes <= of.room()) { // put together here, in the order of ranks
                     of.begin(data, of.bytes);
                     of.take = [](operation const& done) {
                       detail::fold_in_rank_order(std::span{reinterpret_cast<T*>(done.out), done.bytes / sizeof(T)},
                                                  static_cast<int>(done.ranks()), done.header.called.op, [&](int r) {
                                                    return reinterpret_cast<T const*>(
                                                        done.data_of(static_cast<std::size_t>(r)));
                                                  });
                     };
                     return;
                   }
                   of.begin_in_place(data, detail::c10d_type<T>(), [&](std::vector<at::Tensor>& tensors) {
                     ::c10d::AllreduceOptions options;
                     options.reduceOp = detail::c10d_reduce_op(op);
                     options.timeout = state_->timeout;
                     return state_->group->allreduce(tensors, options);
                   });
                 });
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    detail::require_rank(root, size());
    using operation = detail::c10d_operation;
    start("broadcast", detail::make_header<T>(detail::collective_kind::broadcast, data.size(), root),
          std::span<T const>{data}, data,
          [&](operation& of, std::byte const* bytes) {
            if (of.bytes <= of.room()) {
              of.begin(bytes, of.bytes);
              of.take = [](operation const& done) {
                detail::copy_bytes(done.out, done.data_of(static_cast<std::size_t>(done.header.called.root)),
                                   done.bytes);
              };
              return;
            }
            of.begin_in_place(bytes, at::kByte, [&](std::vector<at::Tensor>& tensors) {
              ::c10d::BroadcastOptions options;
              options.rootRank = root;
              options.timeout = state_->timeout;
              return state_->group->broadcast(tensors, options);
            });
          })
        .wait();
  }

private:
  /// Starts what `launch(operation, in)` begins.
  template <class T, class Launch>
  c10d_work start(char const* name, detail::collective_header const& header, std::span<T const> in, std::span<T> out,
                  Launch const& launch) const {
    state_->require_usable(name);
    if (size() == 1) {
      if (!in.empty()) std::memmove(out.data(), in.data(), in.size_bytes());
      return {};
    }
    try {
      // The backend's threads write to the tensors, and may not where these belong to inference mode.
      c10::InferenceMode const normal_mode{false};
      std::unique_ptr<detail::c10d_operation> operation{
          new detail::c10d_operation{state_, name, header, reinterpret_cast<std::byte*>(out.data())}};
      launch(*operation, reinterpret_cast<std::byte const*>(in.data()));
      return c10d_work{std::move(operation)};
    } catch (error const&) {
      throw; // of one of the two collectives, or the ranks disagree
    } catch (...) {
      state_->fail(name, std::current_exception());
    }
  }

  std::shared_ptr<detail::c10d_state> state_;
};

} // namespace syncnorm
