#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

/// A stand-in for the CUDA runtime, linked into tests in its place: the few functions that the library calls, on the host.
/// Device memory is at addresses that the host may not touch; a stream is a thread; a graph is the list of what was captured.
/// It shows what is enqueued, in which order, and what an error does, and nothing about a GPU.
namespace fake_cuda {

/// How often `function` was called since the last `reset`, by any thread.
int calls(std::string const& function);

/// Lets the next call of `function` by this thread return `code`, or the one after so many.
void fail_next(std::string const& function, cudaError_t code, int after = 0);

/// Counts a call of `function`, and returns what is injected for it: success, unless there is something.
cudaError_t enter(char const* function);

/// Forgets calls, and the failures injected for this thread.
void reset();

/// Bytes of device and pinned memory that are allocated.
std::size_t allocated();

/// Where device addresses from `begin` to `end` are found by what stands for the device: `shift` bytes further.
struct device_addresses {
  std::uintptr_t begin, end, shift;
};
device_addresses addresses();

/// What the host has at the place of `pointer`, if that is of device memory.
template <class T>
T* on_host(T* pointer) {
  auto const address = reinterpret_cast<std::uintptr_t>(pointer);
  auto const device = addresses();
  return address >= device.begin && address < device.end ? reinterpret_cast<T*>(address + device.shift) : pointer;
}

/// f(data, bytes) for each allocation.
void for_each_allocation(std::function<void(void*, std::size_t)> const& f);

/// Notes what work of a stream found wrong.
void note(std::string const& what);
/// What was noted since the last call.
std::vector<std::string> noted();

/// Enqueues what a kernel would do; records it where the stream is being captured.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

/// The same of the work that `issue` returns, which is called for each time that it is enqueued or replayed, as it is.
cudaError_t enqueue_issued(cudaStream_t stream, std::function<std::function<void()>()> issue);

/// The device that a stream belongs to.
int device_of(cudaStream_t stream);

} // namespace fake_cuda
