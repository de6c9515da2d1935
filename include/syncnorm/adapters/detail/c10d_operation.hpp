#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/lasting_failure.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

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

/// `group`, or a process group of its own for a backend of CPU tensors.
template <class Group>
[[nodiscard]] c10::intrusive_ptr<::c10d::ProcessGroup> process_group_of(c10::intrusive_ptr<Group> group) {
  if constexpr (std::derived_from<Group, ::c10d::ProcessGroup>) {
    return group;
  } else {
    // Depends on `Group`, since libtorch 1 has groups without backends.
    using group_of = std::conditional_t<sizeof(Group) != 0, ::c10d::ProcessGroup, Group>;
    auto whole = c10::make_intrusive<group_of>(group->getRank(), group->getSize());
    whole->setBackend(at::kCPU, group_of::BackendType::CUSTOM, std::move(group));
    return whole;
  }
}

/// What the copies of a communicator share.
struct c10d_state {
  c10::intrusive_ptr<::c10d::ProcessGroup> group;
  std::string backend;
  std::chrono::milliseconds timeout;
  lasting_failure failure{};
  std::atomic<std::int64_t> started = 0; ///< operations

  /// Marks the communicator as unusable and throws `thrown` as one of syncnorm's own.
  [[noreturn]] void fail(char const* operation, std::exception_ptr const& thrown) {
    failure.happen();
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
                         std::to_string(group->getSize()) + " (" + backend + "): " + text;
    failure.happen(message);
    // The backends throw plain runtime errors, of which only the text tells a late peer from a lost one.
    if (text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos)
      throw timeout_error{"c10d", message};
    throw communicator_error{"c10d", message};
  }

  void require_usable(char const* operation) const {
    if (failure.has_happened()) throw communicator_error{"c10d", std::string{operation} + ": " + failure.text()};
  }
};

/// A collective as what the backend is asked for: first an allgather of one length on every rank, whatever the data's, of headers and
/// data that fit; then, if there are more and the headers agree, a collective of those. Of messages of different lengths, and of
/// different collectives, a backend may make wrong data, or end the process.
struct c10d_operation {
  std::shared_ptr<c10d_state> state;
  char const* name;
  collective_header header;
  std::byte* out;                       ///< where the result goes
  std::size_t bytes = bytes_of(header); ///< of this rank
  std::int64_t number = 0; ///< operations that this communicator has begun, for messages: ranks may count differently
  std::optional<std::chrono::steady_clock::time_point> deadline{};
  at::Tensor heads{}, rest{}; ///< of all ranks; what the second collective gives
  std::vector<c10::intrusive_ptr<::c10d::Work>> works{};
  void (*take)(c10d_operation const&) = nullptr; ///< the result out of heads and rest

  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(state->group->getSize()); }
  /// Bytes of the first message: statistics of 2048 channels, or of few where many ranks gather them.
  [[nodiscard]] std::size_t head() const { return ranks() <= 16 ? 36'864 : 4096; }
  [[nodiscard]] std::size_t room() const { return head() - sizeof(collective_header); }
  /// What rank `r` sent first.
  [[nodiscard]] std::byte const* head_of(std::size_t r) const {
    return static_cast<std::byte const*>(heads.data_ptr()) + r * head();
  }
  [[nodiscard]] std::byte const* data_of(std::size_t r) const { return head_of(r) + sizeof(collective_header); }
  [[nodiscard]] collective_header header_of(std::size_t r) const {
    collective_header of_rank;
    std::memcpy(&of_rank, head_of(r), sizeof of_rank);
    return of_rank;
  }

  /// Begins with the header and so many bytes of data.
  void begin(std::byte const* data, std::size_t count) {
    auto const own = at::zeros({static_cast<std::int64_t>(head())}, at::kByte);
    number = state->started++;
    std::memcpy(own.data_ptr(), &header, sizeof header);
    copy_bytes(static_cast<std::byte*>(own.data_ptr()) + sizeof header, data, count);
    heads = gather(own);
  }
  /// Begins to gather a tensor of all ranks, into what it returns.
  [[nodiscard]] at::Tensor gather(at::Tensor const& own) {
    auto all = at::empty({static_cast<std::int64_t>(ranks()), own.numel()}, own.options());
    std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
    std::vector<at::Tensor> inputs{own};
    ::c10d::AllgatherOptions options;
    options.timeout = state->timeout;
    works.push_back(state->group->allgather(outputs, inputs, options));
    return all;
  }
  /// So many bytes of data as a tensor.
  [[nodiscard]] static at::Tensor copy_of(std::byte const* data, std::size_t count, at::ScalarType type = at::kByte) {
    auto copy = at::empty({static_cast<std::int64_t>(count / at::elementSize(type))}, type);
    copy_bytes(copy.data_ptr(), data, count);
    return copy;
  }

  /// Begins with the header alone, and, when all agree, has launch(tensors) begin a collective whose result is in the data's tensor.
  template <class Launch>
  void begin_in_place(std::byte const* data, at::ScalarType type, Launch const& launch) {
    begin(nullptr, 0);
    agree();
    rest = copy_of(data, bytes, type);
    std::vector<at::Tensor> tensors{rest};
    works.push_back(launch(tensors));
    take = [](c10d_operation const& done) { copy_bytes(done.out, done.rest.data_ptr(), done.bytes); };
  }

  /// Of the timeout, which begins with the first call.
  [[nodiscard]] std::chrono::milliseconds remaining() {
    auto const now = std::chrono::steady_clock::now();
    if (!deadline) deadline = now + state->timeout;
    return std::chrono::ceil<std::chrono::milliseconds>(*deadline - now);
  }

  /// Whether there is something to wait for.
  [[nodiscard]] bool in_flight() const {
    return !std::ranges::all_of(works, [](auto const& work) { return work->isCompleted(); });
  }

  /// Waits for the headers. Throws mismatch_error, on every rank, where they differ, and what failed.
  void agree() {
    wait(works.front());
    auto const text = describe_mismatch(static_cast<int>(ranks()), [&](int r) {
      auto called = header_of(static_cast<std::size_t>(r)).called;
      called.sequence = number;
      return called;
    });
    if (!text.empty()) throw mismatch_error{text};
    deadline.reset(); // for the second collective
  }

  /// Waits for all, and takes the result. Throws what failed.
  void finish() {
    if (works.size() == 1) agree(); // else they have
    wait(works.back());
    take(*this);
  }

private:
  void wait(c10::intrusive_ptr<::c10d::Work> const& work) {
    try {
      // To the backend 0 means no timeout at all.
      bool const completed = work->wait(std::max(remaining(), std::chrono::milliseconds{1}));
      TORCH_CHECK(completed, "the operation was aborted");
    } catch (...) {
      state->fail(name, std::current_exception());
    }
  }
};

} // namespace syncnorm::detail
