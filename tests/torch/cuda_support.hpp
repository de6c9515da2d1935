#pragma once

#include "steps.hpp"

#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/cuda.hpp>

#include "cuda/fake_runtime.hpp"
#include "torch/stand_in/cuda_device.hpp"

// The module over CUDA tensors, on the CPU: the devices are stand-ins, the kernels' source runs on an interpreter, ranks are
// threads. Nothing here runs on a GPU.
namespace test::on_cuda {

using syncnorm::activation;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::use_cuda;

using staged_threads = syncnorm::staged<thread_communicator>;

/// A rank's device: autograd has one thread for each, in which the staged exchange of a backward pass waits for the others.
inline torch::Device device_of(thread_communicator const& comm) {
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(comm.rank())};
}

/// Copies of a module for the CPU and for the rank's device.
inline SyncBatchNorm on_host(SyncBatchNorm const& norm, thread_communicator const& comm) {
  auto copy = copy_of(norm);
  copy->set_communicator(comm);
  return copy;
}
inline SyncBatchNorm on_device(SyncBatchNorm const& norm, thread_communicator const& comm) {
  auto copy = copy_of(norm);
  copy->to(device_of(comm));
  use_cuda(*copy, staged_threads{comm});
  return copy;
}

inline void check_no_violations() {
  for (auto const& what : fake_cuda::noted()) FAIL_CHECK(what);
}

} // namespace test::on_cuda
