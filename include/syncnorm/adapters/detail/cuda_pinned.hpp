#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>

namespace syncnorm::detail {

/// Page-locked memory of the host, as much as was ever asked for.
class pinned_buffer {
public:
  pinned_buffer() = default;
  pinned_buffer(pinned_buffer const&) = delete;
  pinned_buffer& operator=(pinned_buffer const&) = delete;
  ~pinned_buffer() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }

  /// `n` elements whose values are unspecified. What was held before must not be in use.
  template <class T>
  [[nodiscard]] std::span<T> hold(std::size_t n) {
    if (auto const needed = n * sizeof(T); needed > capacity_) {
      if (data_ != nullptr) require_cuda(cudaFreeHost(data_), "cudaFreeHost");
      data_ = nullptr;
      capacity_ = 0;
      require_cuda(cudaHostAlloc(&data_, needed, cudaHostAllocPortable), "cudaHostAlloc");
      capacity_ = needed;
    }
    return {static_cast<T*>(data_), n};
  }

private:
  void* data_ = nullptr;
  std::size_t capacity_ = 0;
};

/// The latest point of a stream that was recorded. Destruction waits for it, for the sake of memory in use up to there.
class cuda_event {
public:
  cuda_event() = default;
  cuda_event(cuda_event const&) = delete;
  cuda_event& operator=(cuda_event const&) = delete;
  ~cuda_event() {
    if (event_ == nullptr) return;
    cudaEventSynchronize(event_);
    cudaEventDestroy(event_);
  }

  /// The device of the stream must be current.
  void record(CUstream_st* stream) {
    int device = 0;
    require_cuda(cudaGetDevice(&device), "cudaGetDevice");
    if (event_ != nullptr && device != device_) { // whose streams take events of their own alone
      wait();
      require_cuda(cudaEventDestroy(std::exchange(event_, nullptr)), "cudaEventDestroy");
    }
    if (event_ == nullptr)
      require_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    device_ = device;
    require_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  /// Blocks until the stream is past that point; returns at once where none was recorded.
  void wait() const {
    if (event_ != nullptr) require_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }

private:
  cudaEvent_t event_ = nullptr;
  int device_ = 0;
};

} // namespace syncnorm::detail
