#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <nccl.h>

#include <syncnorm/adapters/detail/nccl_channel.hpp>
#include <syncnorm/adapters/nccl_error.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// The communicator of an ncclComm_t, whose collectives are of device memory, in the order of a stream; the host waits for
/// none, and all may be captured in a graph. There is nothing here for host memory. NCCL reduces each element on one rank
/// or along one tree and passes the result on, so that all ranks get the same bits. Copies are the same rank.
///
/// What fails on the device or among peers is an nccl_error of the next call, of `check()` or of `synchronize(stream)`. A peer
/// that never comes keeps the stream waiting: `synchronize` ends that after the timeout, and aborts the communicator.
///
/// NCCL may connect ranks in their first collectives of a kind and size, which then wait for the peers on the host. Where the communicator
/// blocks, as by default, the timeout does not apply to these, nor to `split`: only `abort` by another thread ends them. Where it does
/// not (`ncclConfig_t::blocking = 0`), a call waits until NCCL has enqueued it, for the timeout at most, and then aborts, too.
///
/// What one rank captures in a graph every rank has to, and they replay it together. Collectives of several communicators on one device,
/// as that of whoever sums the gradients of the rest, may wait for each other for ever where they are in flight at the same time: let
/// them follow each other, in one order on every rank, by one stream or by events. Sources: NCCL's documentation, "Using NCCL with
/// CUDA Graphs", and "Using multiple NCCL communicators concurrently".
///
/// Where ranks are GPUs of one process, CUDA may let a call that allocates or frees memory on one wait for the kernels of the others, and
/// so for a collective that waits for this rank: let them meet on the host after they have made layers, and before they destroy
/// them. Their threads capture in cudaStreamCaptureModeThreadLocal. As cudaGraphLaunch may wait, too, NCCL recommends a process of its
/// own for each GPU where there are graphs.
class nccl_communicator {
public:
  /// Does not own `comm`, which must outlive the communicator and its copies. Local. Throws invalid_argument_error where
  /// `comm` is null or the timeout is not positive, nccl_error.
  explicit nccl_communicator(ncclComm_t comm, std::chrono::milliseconds timeout = default_timeout)
      : channel_{std::make_shared<detail::nccl_channel>(comm, false, timeout)} {}

  /// Owns `comm`, unless this throws; the last copy destroys it, or aborts it where it has failed. NCCL does not destroy it before the
  /// graphs that hold collectives of it: destroy these first.
  [[nodiscard]] static nccl_communicator adopt(ncclComm_t comm, std::chrono::milliseconds timeout = default_timeout) {
    return nccl_communicator{std::make_shared<detail::nccl_channel>(comm, true, timeout)};
  }

  [[nodiscard]] int rank() const noexcept { return channel_->rank(); }
  [[nodiscard]] int size() const noexcept { return channel_->size(); }
  /// Null after `abort`.
  [[nodiscard]] ncclComm_t native_handle() const noexcept { return channel_->comm(); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const {
    channel_->call("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(in.data(), out.data(), in.size(), detail::nccl_type_of<T>, comm, stream);
    });
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op, CUstream_st* stream) const {
    channel_->call("ncclAllReduce", [&](ncclComm_t comm) {
      return ncclAllReduce(in.data(), out.data(), in.size(), detail::nccl_type_of<T>, detail::to_nccl(op), comm,
                           stream);
    });
  }

  /// Enqueues the collectives that `f` calls as one group: `ncclGroupStart`, `f()`, `ncclGroupEnd`. The same on every rank.
  template <class F>
  void batch(F const& f) const {
    channel_->batch(f);
  }

  /// The communicator of the ranks that give the same colour, ≥ 0, in the order of (key, rank); it owns its ncclComm_t.
  /// Collective, blocking. A rank whose colour is negative joins, and throws invalid_argument_error afterwards.
  [[nodiscard]] nccl_communicator split(int color, int key) const {
    auto* const part = channel_->split(color, key);
    if (color < 0)
      throw invalid_argument_error{"nccl_communicator: the colour " + std::to_string(color) + " is negative"};
    try {
      return adopt(part, channel_->timeout());
    } catch (...) {
      if (part != nullptr) ncclCommAbort(part);
      throw;
    }
  }

  /// Throws what has failed. Local, does not wait.
  void check() const { channel_->check(); }

  /// Waits until the stream is done with what was enqueued, for the timeout at most. Throws what fails meanwhile, after
  /// which the communicator is aborted, so that the stream is done; timeout_error, likewise; cuda_error.
  void synchronize(CUstream_st* stream) const { channel_->synchronize(stream); }

  /// Ends what this rank has in flight, so that the stream goes on with buffers in no particular state, and makes the
  /// communicator unusable here. It frees the ncclComm_t, which its owner must then not destroy, in one that is not owned too;
  /// NCCL does so when the last graph is destroyed that holds a collective of it, for which a second is waited at most.
  /// Other ranks notice by their own errors and timeouts. Another thread may call this one member.
  void abort() const { channel_->abort("aborted on rank " + std::to_string(rank())); }

private:
  explicit nccl_communicator(std::shared_ptr<detail::nccl_channel> channel) : channel_{std::move(channel)} {}

  std::shared_ptr<detail::nccl_channel> channel_;
};

} // namespace syncnorm
