#pragma once

#include <cstddef>
#include <utility>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>

namespace syncnorm::cuda::detail {

/// cudaMemcpy from the host, done on return: cudaMemcpy and cudaMemset may return earlier, which streams that do not wait for
/// the default one would notice.
inline void copy_to_device(void* to, void const* from, std::size_t bytes) {
  using syncnorm::detail::require_cuda;
  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread), "cudaMemcpyAsync");
  require_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

/// Device memory, zeroed, that belongs to the device that was current at its making.
class device_memory {
public:
  device_memory() = default;
  explicit device_memory(std::size_t bytes) : device_memory{} { // so that the destructor runs where this throws
    using syncnorm::detail::require_cuda;
    if (bytes == 0) return;
    require_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
    require_cuda(cudaMemsetAsync(data_, 0, bytes, cudaStreamPerThread), "cudaMemsetAsync");
    require_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }
  device_memory(device_memory&& other) noexcept : data_{std::exchange(other.data_, nullptr)} {}
  device_memory& operator=(device_memory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~device_memory() {
    if (data_ != nullptr) cudaFree(data_);
  }

  [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }

private:
  void* data_ = nullptr;
};

/// Page-locked memory of the host that the device writes to as well; its contents are unspecified.
class mapped_memory {
public:
  mapped_memory() = default;
  explicit mapped_memory(std::size_t bytes) : mapped_memory{} { // as above
    using syncnorm::detail::require_cuda;
    require_cuda(cudaHostAlloc(&data_, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    require_cuda(cudaHostGetDevicePointer(&device_, data_, 0), "cudaHostGetDevicePointer");
  }
  mapped_memory(mapped_memory&& other) noexcept
      : data_{std::exchange(other.data_, nullptr)}, device_{std::exchange(other.device_, nullptr)} {}
  mapped_memory& operator=(mapped_memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~mapped_memory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }

  [[nodiscard]] std::byte* host() const noexcept { return static_cast<std::byte*>(data_); }
  /// As the device that was current at its making sees it.
  [[nodiscard]] std::byte* device() const noexcept { return static_cast<std::byte*>(device_); }

private:
  void *data_ = nullptr, *device_ = nullptr;
};

/// Cuts memory into arrays, each aligned to 256 bytes. With no memory it counts the bytes.
class memory_cutter {
public:
  explicit memory_cutter(std::byte* data = nullptr) : data_{data} {}

  template <class T>
  [[nodiscard]] T* take(std::size_t n) {
    auto* const at = data_ == nullptr || n == 0 ? nullptr : data_ + used_;
    used_ += (n * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

private:
  std::byte* data_;
  std::size_t used_ = 0;
};

} // namespace syncnorm::cuda::detail
