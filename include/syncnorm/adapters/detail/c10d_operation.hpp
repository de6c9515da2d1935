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
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <syncnorm/adapters/detail/collective_header.hpp>
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

/// What the copies of a communicator share.
struct c10d_state {
  c10::intrusive_ptr<::c10d::ProcessGroup> group;
  std::chrono::milliseconds timeout;
  std::atomic<bool> failed = false;
  std::atomic<std::int64_t> started = 0; ///< operations

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

/// A collective as what the backend is asked for: messages of one length on every rank, whatever the data's, since a backend may end
/// the process where they differ. The first is an allgather of headers, with the data or the beginning of it; what is left goes in
/// frames, each four times as long as the one before: a collective costs far more than the bytes that it takes for nothing. All are
/// begun at once; where headers differ, nobody waits for the rest.
struct c10d_operation {
  /// Bytes of frame `i`.
  [[nodiscard]] static constexpr std::size_t frame(std::size_t i) {
    return std::size_t{131'072} << 2 * std::min<std::size_t>(i, 4);
  }

  std::shared_ptr<c10d_state> state;
  char const* name;
  collective_header header;
  std::byte* out;                       ///< where the result goes
  std::size_t bytes = bytes_of(header); ///< of this rank
  std::int64_t number = 0; ///< of operations of this communicator, which other ranks may have made at another time
  std::optional<std::chrono::steady_clock::time_point> deadline{};
  at::Tensor heads{};               ///< of all ranks
  std::vector<at::Tensor> frames{}; ///< results
  std::vector<c10::intrusive_ptr<::c10d::Work>> works{};
  void (*take)(c10d_operation const&) = nullptr; ///< the result out of heads and frames

  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(state->group->getSize()); }
  /// Bytes of the first message: statistics of 2048 channels, or of few where many ranks gather them.
  [[nodiscard]] std::size_t head() const { return ranks() <= 16 ? 36'864 : 4096; }
  [[nodiscard]] std::size_t room() const { return head() - sizeof(collective_header); }
  /// Data that the head of rank `r` brings.
  [[nodiscard]] std::byte const* data_of(std::size_t r) const {
    return static_cast<std::byte const*>(heads.data_ptr()) + r * head() + sizeof(collective_header);
  }
  [[nodiscard]] collective_header header_of(std::size_t r) const {
    collective_header of_rank;
    std::memcpy(&of_rank, static_cast<std::byte const*>(heads.data_ptr()) + r * head(), sizeof of_rank);
    return of_rank;
  }
  /// Rank `r`'s part of frame `i`, if that was gathered.
  [[nodiscard]] std::byte const* frame_of(std::size_t i, std::size_t r) const {
    return static_cast<std::byte const*>(frames[i].data_ptr()) + r * frame(i);
  }
  /// Calls f(i, where the data in frame i begin, how many there are) for each frame of the data from `at` on.
  template <class F>
  void for_each_frame(std::size_t at, F const& f) const {
    for (std::size_t i = 0; at < bytes; at += frame(i++)) f(i, at, std::min(frame(i), bytes - at));
  }

  /// Begins with the header and so many bytes of data.
  void begin(std::byte const* data, std::size_t count) {
    auto const own = at::zeros({static_cast<std::int64_t>(head())}, at::kByte);
    number = state->started++;
    std::memcpy(own.data_ptr(), &header, sizeof header);
    if (count != 0) std::memcpy(static_cast<std::byte*>(own.data_ptr()) + sizeof header, data, count);
    heads = at::empty({static_cast<std::int64_t>(ranks()), static_cast<std::int64_t>(head())}, at::kByte);
    gather(own, heads);
  }
  void gather(at::Tensor const& own, at::Tensor const& all) {
    std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
    std::vector<at::Tensor> inputs{own};
    ::c10d::AllgatherOptions options;
    options.timeout = state->timeout;
    works.push_back(state->group->allgather(outputs, inputs, options));
  }
  /// Calls f(frame) for each frame of the data from `from` on; what is left of the last is 0.
  template <class F>
  void fill_frames(std::byte const* data, std::size_t from, at::ScalarType type, F const& f) const {
    for_each_frame(from, [&](std::size_t i, std::size_t at, std::size_t count) {
      auto const own = at::zeros({static_cast<std::int64_t>(frame(i) / at::elementSize(type))}, type);
      std::memcpy(own.data_ptr(), data + at, count);
      f(own);
    });
  }

  /// Begins with the header, and launches a collective of its own for each frame of the data, whose result is in the frame.
  template <class Launch>
  void begin_in_place(std::byte const* data, at::ScalarType type, Launch const& launch) {
    begin(nullptr, 0);
    fill_frames(data, 0, type, [&](at::Tensor const& own) {
      std::vector<at::Tensor> tensors{own};
      works.push_back(launch(tensors));
      frames.push_back(own);
    });
    take = [](c10d_operation const& done) {
      done.for_each_frame(0, [&](std::size_t i, std::size_t at, std::size_t count) {
        std::memcpy(done.out + at, done.frame_of(i, 0), count);
      });
    };
  }

  /// Of the timeout, which begins with the first call.
  [[nodiscard]] std::chrono::milliseconds remaining() {
    auto const now = std::chrono::steady_clock::now();
    if (!deadline) deadline = now + state->timeout;
    return std::chrono::ceil<std::chrono::milliseconds>(*deadline - now);
  }

  /// Whether there is something to wait for.
  [[nodiscard]] bool in_flight() const {
    if (!works.front()->isCompleted()) return true;
    if (!works.front()->isSuccess() || !mismatch().empty()) return false;
    return !std::ranges::all_of(works, [](auto const& work) { return work->isCompleted(); });
  }
  [[nodiscard]] std::string mismatch() const {
    return describe_mismatch(static_cast<int>(ranks()), [&](int r) {
      auto called = header_of(static_cast<std::size_t>(r)).called;
      called.sequence = number;
      return called;
    });
  }

  /// Waits for all, and takes the result. Throws what failed.
  void finish() {
    auto const wait = [&](auto const& work) {
      try {
        // To the backend 0 means no timeout at all.
        bool const completed = work->wait(std::max(remaining(), std::chrono::milliseconds{1}));
        TORCH_CHECK(completed, "the operation was aborted");
      } catch (...) {
        state->fail(name, std::current_exception());
      }
    };
    wait(works.front());
    if (auto const text = mismatch(); !text.empty()) {
      state->failed = true;
      throw mismatch_error{text};
    }
    std::for_each(works.begin() + 1, works.end(), wait);
    take(*this);
  }
};

} // namespace syncnorm::detail
