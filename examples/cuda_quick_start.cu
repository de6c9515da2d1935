// A training step of one layer on every GPU of this machine, a thread and a rank of NCCL to each, captured in a CUDA graph.

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/syncnorm.cuh>

namespace {

constexpr std::int64_t channels = 64, pixels = 56 * 56;

void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error{cudaGetErrorString(code)};
}

/// y has the mean 0, over all ranks.
void require_mean_of_zero(syncnorm::thread_communicator const& thread, std::span<float const> y) {
  std::array<double, 2> sums{0, static_cast<double>(y.size())};
  for (float const value : y) sums[0] += value;
  syncnorm::allreduce(thread, sums, std::span<double>{sums});
  if (!(std::abs(sums[0] / sums[1]) < 1e-5)) throw std::runtime_error{"the mean of y is not 0"};
}

void train(syncnorm::nccl_communicator const& comm, syncnorm::thread_communicator const& thread) {
  check(cudaSetDevice(comm.rank()));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  std::int64_t const samples = 2 + comm.rank(); // ranks may differ, and one may have none
  float* memory = nullptr;
  auto const elements = samples * channels * pixels;
  check(cudaMalloc(reinterpret_cast<void**>(&memory), 4 * sizeof(float) * static_cast<std::size_t>(elements)));
  std::vector<float> values(static_cast<std::size_t>(4 * elements), 1.0F);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i % 101 + 10 * static_cast<std::size_t>(comm.rank()));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
  auto const view = [&](int i) { return syncnorm::nchw(memory + i * elements, samples, channels, pixels); };
  auto const x = view(0), y = view(1), dy = view(2), dx = view(3);
  {
    syncnorm::cuda::batch_norm<float, syncnorm::nccl_communicator> layer{comm, channels};
    thread.barrier();                  // ranks of one process allocate and free nothing while others exchange
    layer.prepare(stream);             // loads the kernels; the ranks agree, and NCCL connects them
    layer.forward(x, y, stream);       // two kernels and one allgather, enqueued
    layer.backward(x, dy, dx, stream); // the same
    layer.synchronize(stream);

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t step = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    layer.forward(x, y, stream);
    layer.backward(x, dy, dx, stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&step, graph, 0));
    for (int i = 0; i < 10; ++i) check(cudaGraphLaunch(step, stream));
    layer.synchronize(stream); // throws what went wrong in a step, the same on every rank
    check(cudaGraphExecDestroy(step));
    check(cudaGraphDestroy(graph));
    thread.barrier();
  }
  check(cudaMemcpy(values.data(), memory, values.size() * sizeof(float), cudaMemcpyDeviceToHost));
  require_mean_of_zero(
      thread, std::span{values}.subspan(static_cast<std::size_t>(elements), static_cast<std::size_t>(elements)));
  check(cudaFree(memory));
  check(cudaStreamDestroy(stream));
}

} // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU");
    return 77;
  }
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(devices));
  if (auto const code = ncclCommInitAll(comms.data(), devices, nullptr); code != ncclSuccess) {
    std::fprintf(stderr, "ncclCommInitAll: %s\n", ncclGetErrorString(code));
    return 1;
  }
  syncnorm::run_ranks(devices, [&](syncnorm::thread_communicator const& thread) {
    train(syncnorm::nccl_communicator::adopt(comms[static_cast<std::size_t>(thread.rank())]), thread);
  });
  std::printf("trained on %d GPUs\n", devices);
  return std::fflush(stdout) == 0 ? 0 : 1;
}
