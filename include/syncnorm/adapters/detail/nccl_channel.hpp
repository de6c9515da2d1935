#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <syncnorm/adapters/nccl_error.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>

namespace syncnorm::detail {

template <wire_type T>
inline constexpr ncclDataType_t nccl_type_of = std::is_same_v<T, float>          ? ncclFloat32
                                               : std::is_same_v<T, double>       ? ncclFloat64
                                               : std::is_same_v<T, std::int32_t> ? ncclInt32
                                               : std::is_same_v<T, std::int64_t> ? ncclInt64
                                                                                 : ncclUint8;

[[nodiscard]] constexpr ncclRedOp_t to_nccl(reduce_op op) {
  return op == reduce_op::sum ? ncclSum : op == reduce_op::min ? ncclMin : ncclMax;
}

/// An ncclComm_t, and what has become of it.
class nccl_channel {
public:
  using clock = std::chrono::steady_clock;

  nccl_channel(ncclComm_t comm, bool owned, std::chrono::milliseconds timeout)
      : comm_{comm}, owned_{owned}, timeout_{checked_timeout("nccl_communicator", timeout)} {
    if (comm == nullptr) throw invalid_argument_error{"nccl_communicator: the ncclComm_t is null"};
    // Of one that is still being made, NCCL calls the question an invalid argument.
    require(await(ncclInProgress), "ncclCommGetAsyncError", comm);
    require(ncclCommUserRank(comm, &rank_), "ncclCommUserRank", comm);
    require(ncclCommCount(comm, &size_), "ncclCommCount", comm);
  }
  nccl_channel(nccl_channel const&) = delete;
  nccl_channel& operator=(nccl_channel const&) = delete;
  ~nccl_channel() {
    auto* const comm = comm_.load();
    if (!owned_ || comm == nullptr) return;
    if (failed_)
      abort_apart(comm, split_into_);
    else
      ncclCommDestroy(comm);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] ncclComm_t comm() const noexcept { return comm_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  /// start(comm), after what has failed since was thrown.
  template <class Start>
  void call(char const* name, Start const& start) {
    check();
    auto* const comm = comm_.load();
    if (comm == nullptr) require_usable(); // another thread has aborted it since
    // Within a group, NCCL reports the calls' fate at its end.
    auto const code = batching_ ? start(comm) : await_or_abort(start(comm));
    if (code == ncclSuccess || (batching_ && code == ncclInProgress)) return;
    nccl_error const failure{name, code, comm};
    fail(failure.message());
    throw failure;
  }

  template <class F>
  void batch(F const& f) {
    check();
    require(ncclGroupStart(), "ncclGroupStart", comm_);
    batching_ = true;
    std::exception_ptr thrown;
    try {
      f();
    } catch (...) { // the group has to be closed all the same
      thrown = std::current_exception();
    }
    batching_ = false;
    auto* const comm = comm_.load();
    auto const code = await_or_abort(ncclGroupEnd());
    if (thrown) std::rethrow_exception(thrown);
    if (code == ncclSuccess) return;
    nccl_error const failure{"ncclGroupEnd", code, comm};
    fail(failure.message());
    throw failure;
  }

  /// Null for a negative colour.
  [[nodiscard]] ncclComm_t split(int color, int key) {
    auto const part = std::make_shared<ncclComm_t>(nullptr);
    {
      std::lock_guard const lock{mutex_};
      split_into_ = part;
    }
    call("ncclCommSplit", [&](ncclComm_t comm) {
      return ncclCommSplit(comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, part.get(), nullptr);
    });
    return *part;
  }

  void check() {
    require_usable();
    auto const code = ask();
    if (code == ncclSuccess || code == ncclInProgress) return;
    nccl_error const failure{"on the device or of a peer", code, comm_};
    fail(failure.message());
    throw failure;
  }

  void synchronize(CUstream_st* stream) {
    using namespace std::chrono_literals;
    auto const deadline = clock::now() + timeout_;
    for (int polls = 0;; ++polls) {
      auto const code = query(stream);
      if (code == cudaSuccess) return check();
      if (code != cudaErrorNotReady) {
        bool const captures = code == cudaErrorStreamCaptureUnsupported || code == cudaErrorStreamCaptureImplicit ||
                              code == cudaErrorStreamCaptureInvalidated;
        if (!captures) abort(cudaGetErrorString(code));
        require_cuda(code, "cudaStreamQuery");
      }
      forget_last_error(); // that it is not ready
      try {
        check();
      } catch (nccl_error const&) {
        free_communicator();
        throw;
      }
      if (clock::now() >= deadline) {
        timeout_error const failure{"nccl", "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                                                " waited " + std::to_string(timeout_.count()) +
                                                " ms for the stream; a peer may not have come"};
        abort(failure.message());
        throw failure;
      }
      if (polls < 1000)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(20us);
    }
  }

  void abort(std::string const& reason) {
    fail(reason);
    free_communicator();
  }

private:
  [[nodiscard]] static cudaError_t query(CUstream_st* stream) {
    relaxed_capture const as_asking_enqueues_nothing;
    return cudaStreamQuery(stream);
  }

  void require_usable() {
    if (!failed_) return;
    std::lock_guard const lock{mutex_};
    throw unusable();
  }
  [[nodiscard]] nccl_error unusable() const {
    return nccl_error{"the communicator cannot be used any more: " + reason_};
  }

  void fail(std::string const& reason) {
    std::lock_guard const lock{mutex_};
    if (failed_) return;
    reason_ = reason;
    failed_ = true;
  }

  /// What NCCL says of the communicator, which no other thread frees meanwhile.
  [[nodiscard]] ncclResult_t ask() {
    std::lock_guard const lock{mutex_};
    auto* const comm = comm_.load();
    if (comm == nullptr) throw unusable();
    ncclResult_t code = ncclSuccess;
    auto const asked = ncclCommGetAsyncError(comm, &code);
    return asked != ncclSuccess ? asked : code;
  }

  void free_communicator() {
    ncclComm_t comm = nullptr;
    std::shared_ptr<ncclComm_t> split_into;
    {
      std::lock_guard const lock{mutex_};
      comm = comm_.exchange(nullptr);
      split_into = split_into_;
    }
    if (comm != nullptr) abort_apart(comm, std::move(split_into));
  }

  /// Aborts on a thread of its own, and waits for that a second at most: NCCL first sets the flag that ends what is in flight, and
  /// then keeps its caller until no graph is left that holds a collective of the communicator. `written` lives until then. Where there can
  /// be no thread, this one aborts.
  static void abort_apart(ncclComm_t comm, std::shared_ptr<ncclComm_t> written) noexcept {
    using namespace std::chrono_literals;
    int device = 0;
    (void)cudaGetDevice(&device);
    try {
      std::promise<void> done;
      auto const ended = done.get_future();
      std::thread{[comm, written = std::move(written), device, done = std::move(done)]() mutable {
        (void)cudaSetDevice(device);
        ncclCommAbort(comm);
        done.set_value();
      }}.detach();
      (void)ended.wait_for(1s);
    } catch (...) {
      ncclCommAbort(comm);
    }
  }

  static void require(ncclResult_t code, char const* call, ncclComm_t comm) {
    if (code != ncclSuccess) throw nccl_error{call, code, comm};
  }

  /// `await`, and where that takes too long, ends what the communicator has in flight.
  [[nodiscard]] ncclResult_t await_or_abort(ncclResult_t code) {
    try {
      return await(code);
    } catch (timeout_error const&) {
      free_communicator();
      throw;
    }
  }

  /// What becomes of a call that a communicator that does not block has only begun.
  [[nodiscard]] ncclResult_t await(ncclResult_t code) {
    auto const deadline = clock::now() + timeout_;
    while (code == ncclInProgress) {
      code = ask();
      if (code != ncclInProgress) break;
      if (clock::now() >= deadline) {
        timeout_error const failure{"nccl",
                                    "a call was still in progress after " + std::to_string(timeout_.count()) + " ms"};
        fail(failure.message());
        throw failure;
      }
      std::this_thread::yield();
    }
    return code;
  }

  std::atomic<ncclComm_t> comm_;
  bool owned_;
  std::chrono::milliseconds timeout_;
  int rank_ = 0, size_ = 1;
  bool batching_ = false;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_; // of the rest, and of whoever asks comm_ against whoever frees it
  std::string reason_;
  std::shared_ptr<ncclComm_t> split_into_; // which NCCL may still write when the wait for a split has timed out
};

} // namespace syncnorm::detail
