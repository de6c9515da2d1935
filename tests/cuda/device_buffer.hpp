#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/error.hpp>

namespace test {

/// A stream of its own.
class stream {
public:
  stream() { syncnorm::detail::require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  stream(stream const&) = delete;
  stream& operator=(stream const&) = delete;
  ~stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }
  void wait() const { syncnorm::detail::require_cuda(cudaStreamSynchronize(stream_), "wait"); }

private:
  cudaStream_t stream_ = nullptr;
};

/// cudaMemcpy from the host, done on return, for streams that do not wait for the default one.
inline void copy_to_device(void* to, void const* from, std::size_t bytes) {
  syncnorm::detail::require_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "put");
  syncnorm::detail::require_cuda(cudaStreamSynchronize(nullptr), "put");
}

/// An array in device memory.
template <class T>
class device_buffer {
public:
  explicit device_buffer(std::size_t n) : size_{n} {
    if (n > 0) syncnorm::detail::require_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)), "malloc");
  }
  explicit device_buffer(std::vector<T> const& values) : device_buffer{values.size()} { put(values); }
  device_buffer(device_buffer&& other) noexcept
      : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)} {}
  device_buffer& operator=(device_buffer&&) = delete;
  ~device_buffer() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::span<T> span() const { return {data_, size_}; }

  void put(std::vector<T> const& values) const {
    if (size_ > 0) copy_to_device(data_, values.data(), size_ * sizeof(T));
  }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> values(size_);
    if (size_ > 0)
      syncnorm::detail::require_cuda(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
                                     "get");
    return values;
  }

private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// Lets ranks of one process meet on the host when it is made and when it ends, where their communicator has a `meet`. Made after what
/// is in device memory: CUDA may let a call that allocates or frees some wait for kernels on other GPUs, and so for a collective that
/// waits for its caller.
template <class C>
class meetings {
public:
  explicit meetings(C const& comm) : comm_{&comm} { meet(); }
  meetings(meetings const&) = delete;
  meetings& operator=(meetings const&) = delete;
  ~meetings() {
    try {
      meet();
    } catch (syncnorm::error const&) { // of which another rank has told
    }
  }

private:
  void meet() const {
    if constexpr (requires { comm_->meet(); }) comm_->meet();
  }
  C const* comm_;
};

/// What f() enqueued on a stream while it was captured.
class graph {
public:
  template <class F>
  graph(stream const& on, F const& f) : on_{&on} {
    using syncnorm::detail::require_cuda;
    require_cuda(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "begin capture");
    try {
      f();
    } catch (...) {
      cudaStreamEndCapture(on, &graph_);
      destroy();
      throw;
    }
    require_cuda(cudaStreamEndCapture(on, &graph_), "end capture");
    require_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate");
  }
  graph(graph const&) = delete;
  graph& operator=(graph const&) = delete;
  ~graph() { destroy(); }

  void launch() const { syncnorm::detail::require_cuda(cudaGraphLaunch(exec_, *on_), "launch"); }
  void destroy() {
    if (exec_ != nullptr) cudaGraphExecDestroy(std::exchange(exec_, nullptr));
    if (graph_ != nullptr) cudaGraphDestroy(std::exchange(graph_, nullptr));
  }

private:
  stream const* on_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// Calls f(stream) `times` times, or captures it once in a graph and replays that; then waits.
template <class F>
void run_on(stream const& on, bool captured, F const& f, int times = 1) {
  if (captured) {
    graph const step{on, [&] { f(on); }};
    for (int i = 0; i < times; ++i) step.launch();
    return on.wait();
  }
  for (int i = 0; i < times; ++i) f(on);
  on.wait();
}

} // namespace test
