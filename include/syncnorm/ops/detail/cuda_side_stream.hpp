#pragma once

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>

namespace syncnorm::cuda::detail {

/// A stream on the current device that goes on beside another one.
class side_stream {
public:
  side_stream() {
    using syncnorm::detail::require_cuda;
    try {
      require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      require_cuda(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
      require_cuda(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } catch (...) {
      destroy();
      throw;
    }
  }
  side_stream(side_stream const&) = delete;
  side_stream& operator=(side_stream const&) = delete;
  ~side_stream() { destroy(); }

  /// f(the stream), in which what f enqueues comes after what is in `from` so far.
  template <class F>
  void run_after(cudaStream_t from, F const& f) {
    using syncnorm::detail::require_cuda;
    require_cuda(cudaEventRecord(begun_, from), "cudaEventRecord");
    require_cuda(cudaStreamWaitEvent(stream_, begun_, 0), "cudaStreamWaitEvent");
    f(stream_);
    require_cuda(cudaEventRecord(done_, stream_), "cudaEventRecord");
  }
  /// f(the stream) in the place of `from`, which is of another device: after what is in it so far, and before what it gets from here on.
  template <class F>
  void run_instead(cudaStream_t from, int device_of_from, F const& f) {
    using syncnorm::detail::require_cuda;
    cudaEvent_t begun = nullptr;
    {
      device_scope const there{device_of_from}; // whose stream takes an event of that device alone
      require_cuda(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming), "cudaEventCreateWithFlags");
      auto const code = cudaEventRecord(begun, from);
      if (code == cudaSuccess) require_cuda(cudaStreamWaitEvent(stream_, begun, 0), "cudaStreamWaitEvent");
      cudaEventDestroy(begun);
      require_cuda(code, "cudaEventRecord");
    }
    f(stream_);
    require_cuda(cudaEventRecord(done_, stream_), "cudaEventRecord");
    require_cuda(join(from), "cudaStreamWaitEvent");
  }
  /// Lets what `to` gets from here on come after what was run.
  [[nodiscard]] cudaError_t join(cudaStream_t to) const noexcept { return cudaStreamWaitEvent(to, done_, 0); }
  /// Whether what was run is done.
  [[nodiscard]] bool is_done() const {
    auto const code = [this] {
      relaxed_capture const as_asking_enqueues_nothing;
      return cudaEventQuery(done_);
    }();
    if (code == cudaErrorNotReady)
      syncnorm::detail::forget_last_error();
    else
      syncnorm::detail::require_cuda(code, "cudaEventQuery");
    return code == cudaSuccess;
  }

private:
  void destroy() const noexcept {
    if (done_ != nullptr) cudaEventDestroy(done_);
    if (begun_ != nullptr) cudaEventDestroy(begun_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr, done_ = nullptr;
};

} // namespace syncnorm::cuda::detail
