#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>

namespace bench {

using syncnorm::detail::require_cuda;

/// Device memory, of numbers that are neither all alike nor NaN in any element type.
class device_array {
public:
  explicit device_array(std::size_t bytes) : bytes_{bytes} {
    require_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
    std::vector<unsigned char> pattern(std::min(bytes, std::size_t{1} << 22));
    unsigned state = 1;
    for (auto& byte : pattern) byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 26);
    for (std::size_t done = 0; done < bytes; done += pattern.size())
      require_cuda(cudaMemcpy(as<std::byte>() + done, pattern.data(), std::min(pattern.size(), bytes - done),
                              cudaMemcpyHostToDevice),
                   "cudaMemcpy");
    require_cuda(cudaDeviceSynchronize(),
                 "cudaDeviceSynchronize"); // the benchmarks' stream does not wait for these copies
  }
  device_array(device_array&& other) noexcept : data_{other.data_}, bytes_{other.bytes_} { other.data_ = nullptr; }
  device_array& operator=(device_array&&) = delete;
  ~device_array() { cudaFree(data_); }

  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

/// The median time of run(i), in microseconds, by events on the stream: of `rounds` rounds of `runs` runs each, where i counts
/// runs, so that a run can take another set of inputs than the last.
template <class Run>
double median_us(cudaStream_t stream, int rounds, int runs, Run const& run) {
  cudaEvent_t begin = nullptr, end = nullptr;
  require_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  require_cuda(cudaEventCreate(&end), "cudaEventCreate");
  int i = 0;
  for (; i < runs; ++i) run(i); // not timed
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    require_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    for (int k = 0; k < runs; ++k) run(i++);
    require_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    require_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    require_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    times.push_back(1000.0 * static_cast<double>(ms) / runs);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

} // namespace bench
