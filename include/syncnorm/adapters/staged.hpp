#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <syncnorm/adapters/detail/cuda_pinned.hpp>
#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// Collectives of device memory over a communicator of the host: the input is copied to pinned memory, exchanged, and what
/// came is copied back, in the order of the stream.
///
/// The call returns when the exchange is done, with the copy back enqueued. It waits on the calling thread, and not in a
/// host function of the stream, because a host function may not wait for what other work of CUDA leads to, as the streams
/// of ranks in one process do, runs on a thread that MPI may not know, and cannot throw. So it cannot be captured in a
/// graph: in a stream that is being captured it throws invalid_argument_error, alike on all ranks that capture.
///
/// Errors are those of `C`, and cuda_error, after which the communicator is unusable; peers then get an error at once where `C`
/// can abort them, else within its timeout. Pinned memory of the largest exchange so far is kept. The device of the stream
/// must be current. Copies are the same rank.
template <communicator C>
class staged {
public:
  explicit staged(C comm) : state_{std::make_shared<state>(std::move(comm))} {}

  [[nodiscard]] int rank() const { return syncnorm::rank(state_->comm); }
  [[nodiscard]] int size() const { return syncnorm::size(state_->comm); }
  /// The communicator of the host.
  [[nodiscard]] C const& host() const noexcept { return state_->comm; }
  /// Whether its collectives may be captured in a graph.
  [[nodiscard]] static constexpr bool capturable() noexcept { return false; }

  [[nodiscard]] exchange_cost cost_of_exchange() const { return syncnorm::cost_of_exchange(state_->comm); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const requires allgathers<C, T> {
    exchange(in, out, stream,
             [this](std::span<T const> from, std::span<T> to) { syncnorm::allgather<T>(state_->comm, from, to); });
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op,
                 CUstream_st* stream) const requires allreduces<C, T> {
    exchange(in, out, stream, [this, op](std::span<T const> from, std::span<T> to) {
      syncnorm::allreduce<T>(state_->comm, from, to, op);
    });
  }

  /// Collective, on the host.
  [[nodiscard]] auto split(int color, int key) const requires splits<C> {
    auto part = syncnorm::split(state_->comm, color, key);
    return staged<decltype(part)>{std::move(part)};
  }
  void barrier() const { syncnorm::barrier(state_->comm); }
  void abort() const requires aborts<C> { state_->comm.abort(); }

private:
  struct state {
    explicit state(C host) : comm{std::move(host)} {}
    C comm;
    detail::pinned_buffer sent, received;
    detail::cuda_event copied; // `received` to the device
    std::optional<std::string> failure;
  };

  template <class T, class Collective>
  void exchange(std::span<T const> in, std::span<T> out, CUstream_st* stream, Collective const& collective) const {
    auto& at = *state_;
    if (at.failure) throw communicator_error{"staged", "the communicator cannot be used any more: " + *at.failure};
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    guarded(stream, [&] { detail::require_cuda(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing"); });
    if (capturing != cudaStreamCaptureStatusNone)
      throw invalid_argument_error{"staged: the stream is being captured in a graph, and an exchange over a "
                                   "communicator of the host cannot be"};
    std::span<T> from, to;
    guarded(stream, [&] {
      at.copied.wait();
      from = at.sent.template hold<T>(in.size());
      to = at.received.template hold<T>(out.size());
      copy(from.data(), in.data(), in.size_bytes(), cudaMemcpyDeviceToHost, stream);
      detail::require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    });
    collective(from, to);
    guarded(stream, [&] {
      copy(out.data(), to.data(), to.size_bytes(), cudaMemcpyHostToDevice, stream);
      at.copied.record(stream);
    });
  }

  static void copy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, CUstream_st* stream) {
    if (bytes != 0) detail::require_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
  }

  /// Where f() fails: without this rank, the others wait in vain.
  template <class F>
  void guarded(CUstream_st* stream, F const& f) const {
    try {
      f();
    } catch (cuda_error const& e) {
      cudaStreamSynchronize(stream); // so that nothing is in flight to or from the pinned memory
      state_->failure = e.what();
      if constexpr (aborts<C>) {
        try {
          state_->comm.abort();
        } catch (...) { // what failed first is to be told
        }
      }
      throw;
    }
  }

  std::shared_ptr<state> state_;
};

} // namespace syncnorm
