#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <syncnorm/adapters/detail/broken_pipe.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/timeout.hpp>

namespace syncnorm {

namespace detail {

template <wire_type T>
[[nodiscard]] constexpr at::ScalarType c10d_type() {
  if constexpr (std::same_as<T, float>) return at::kFloat;
  if constexpr (std::same_as<T, double>) return at::kDouble;
  if constexpr (std::same_as<T, std::int32_t>) return at::kInt;
  if constexpr (std::same_as<T, std::int64_t>) return at::kLong;
  if constexpr (std::same_as<T, std::byte>) return at::kByte;
}

[[nodiscard]] inline ::c10d::ReduceOp c10d_reduce_op(reduce_op op) {
  switch (op) {
  case reduce_op::min:
    return ::c10d::ReduceOp::MIN;
  case reduce_op::max:
    return ::c10d::ReduceOp::MAX;
  case reduce_op::sum:
    break;
  }
  return ::c10d::ReduceOp::SUM;
}

/// What the copies of a communicator share.
struct c10d_state {
  c10::intrusive_ptr<::c10d::ProcessGroup> group;
  std::chrono::milliseconds timeout;
  std::atomic<bool> failed = false;

  /// Marks the communicator as unusable and throws `thrown` as one of syncnorm's own.
  [[noreturn]] void fail(char const* operation, std::exception_ptr const& thrown) {
    failed = true;
    std::string text;
    try {
      std::rethrow_exception(thrown);
    } catch (c10::Error const& e) {
      text = e.what_without_backtrace();
    } catch (std::exception const& e) {
      text = e.what();
    } catch (...) {
      text = "an exception of unknown type";
    }
    auto const message = std::string{operation} + " failed on rank " + std::to_string(group->getRank()) + " of " +
                         std::to_string(group->getSize()) + " (" + group->getBackendName() + "): " + text;
    // The backends throw plain runtime errors, of which only the text tells a late peer from a lost one.
    if (text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos)
      throw timeout_error{"c10d", message};
    throw communicator_error{"c10d", message};
  }

  void require_usable(char const* operation) const {
    if (failed)
      throw communicator_error{"c10d", std::string{operation} + ": an earlier collective of this process group failed"};
  }
};

} // namespace detail

/// An operation in flight in a process group. Its timeout counts from the first call of `test` or `wait`. Where an earlier one has
/// failed, nobody waits for it any more.
class c10d_work {
public:
  c10d_work() = default;
  c10d_work(c10d_work&&) = default;
  c10d_work& operator=(c10d_work&& other) noexcept {
    if (this != &other) {
      drop();
      state_ = std::move(other.state_);
      work_ = std::move(other.work_);
      result_ = std::move(other.result_);
      operation_ = other.operation_;
      out_ = other.out_;
      deadline_ = other.deadline_;
    }
    return *this;
  }
  ~c10d_work() { drop(); }

  /// Whether the operation has completed. Throws what failed, a timeout too.
  bool test() {
    if (!work_) return true;
    if (!work_->isCompleted() && !state_->failed && remaining().count() > 0) return false;
    wait();
    return true;
  }

  /// Blocks until the operation has completed. Throws what failed.
  void wait() {
    if (!work_) return;
    // Released first, so that this handle is done whether or not the wait throws.
    auto const work = std::exchange(work_, {});
    if (!work->isCompleted()) state_->require_usable(operation_);
    try {
      // To the backend 0 means no timeout at all.
      bool const completed = work->wait(std::max(remaining(), std::chrono::milliseconds{1}));
      TORCH_CHECK(completed, "the operation was aborted");
      std::memcpy(out_, result_.data_ptr(), result_.nbytes());
    } catch (...) {
      state_->fail(operation_, std::current_exception());
    }
    result_.reset();
  }

private:
  friend class c10d_communicator;
  c10d_work(std::shared_ptr<detail::c10d_state> state, c10::intrusive_ptr<::c10d::Work> work, at::Tensor result,
            char const* operation, void* out)
      : state_{std::move(state)}, work_{std::move(work)}, result_{std::move(result)}, operation_{operation}, out_{out} {
  }

  std::chrono::milliseconds remaining() {
    auto const now = std::chrono::steady_clock::now();
    if (!deadline_) deadline_ = now + state_->timeout;
    return std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - now);
  }

  void drop() noexcept {
    try {
      wait();
    } catch (...) { // nobody is left to hear of it
    }
  }

  std::shared_ptr<detail::c10d_state> state_;
  c10::intrusive_ptr<::c10d::Work> work_;
  at::Tensor result_;
  char const* operation_ = "";
  void* out_ = nullptr;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

/// The ranks of a c10d process group, by its backend for CPU tensors (Gloo, MPI). It shares the ownership of the group,
/// like any other user of one.
///
/// Data crosses in tensors of the adapter's own, which the backend keeps alive: an operation that has timed out here may
/// still be running there, when the caller's buffers are gone. `timeout` bounds the wait for each operation; a shorter
/// one of the group's own wins, and for a longer one Gloo's group, when it is destroyed, waits for what has timed out here.
/// Ranks are to pass messages of one length: where another rank's is longer, a process group of Gloo ends the process from a thread of
/// its own (libtorch 1.13), and the others hear of a lost connection. `gloo_communicator` has an error on every rank there.
/// A process whose SIGPIPE has the default action ignores it from here on, because a backend's writing to a dead peer
/// would otherwise end the process.
class c10d_communicator {
public:
  /// Throws invalid_argument_error where `group` is null or timeout ≤ 0.
  explicit c10d_communicator(c10::intrusive_ptr<::c10d::ProcessGroup> group,
                             std::chrono::milliseconds timeout = default_timeout)
      : state_{std::make_shared<detail::c10d_state>()} {
    if (!group) throw invalid_argument_error{"c10d_communicator: the process group is null"};
    if (timeout.count() <= 0)
      throw invalid_argument_error{"c10d_communicator: timeout " + std::to_string(timeout.count()) +
                                   " ms, expected more than 0"};
    if (group->getSize() > 1) detail::ignore_broken_pipes();
    state_->group = std::move(group);
    state_->timeout = detail::within_a_year(timeout);
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
    return start("allgather", in, out, [&](at::Tensor const& own) {
      auto const all = at::empty({size(), own.numel()}, own.options());
      std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
      std::vector<at::Tensor> inputs{own};
      ::c10d::AllgatherOptions options;
      options.timeout = state_->timeout;
      return std::pair{state_->group->allgather(outputs, inputs, options), all};
    });
  }
  template <reducible_type T>
  [[nodiscard]] c10d_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    return start("allreduce", in, out, [&](at::Tensor const& own) {
      std::vector<at::Tensor> tensors{own};
      ::c10d::AllreduceOptions options;
      options.reduceOp = detail::c10d_reduce_op(op);
      options.timeout = state_->timeout;
      return std::pair{state_->group->allreduce(tensors, options), own};
    });
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    start("broadcast", std::span<T const>{data}, data, [&](at::Tensor const& own) {
      std::vector<at::Tensor> tensors{own};
      ::c10d::BroadcastOptions options;
      options.rootRank = root;
      options.timeout = state_->timeout;
      return std::pair{state_->group->broadcast(tensors, options), own};
    }).wait();
  }

private:
  /// Starts what `launch(own)` makes of a copy of `in`. An empty operation has nothing to say on any rank, and the
  /// backends refuse it.
  template <class T, class Launch>
  c10d_work start(char const* operation, std::span<T const> in, std::span<T> out, Launch const& launch) const {
    state_->require_usable(operation);
    if (in.empty()) return {};
    if (size() == 1) {
      std::memmove(out.data(), in.data(), in.size_bytes());
      return {};
    }
    try {
      // The backend's threads write to the tensors, and may not where these belong to inference mode.
      c10::InferenceMode const normal_mode{false};
      auto const own = at::empty({static_cast<std::int64_t>(in.size())}, at::dtype(detail::c10d_type<T>()));
      std::memcpy(own.data_ptr(), in.data(), in.size_bytes());
      auto [work, result] = launch(own);
      return {state_, std::move(work), std::move(result), operation, out.data()};
    } catch (...) {
      state_->fail(operation, std::current_exception());
    }
  }

  std::shared_ptr<detail::c10d_state> state_;
};

} // namespace syncnorm
