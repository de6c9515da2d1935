// A training step of one layer on every GPU of this machine, a thread and a rank of NCCL to each, captured in a CUDA graph.

#include <cstdint>
#include <cstdio>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/syncnorm.cuh>

namespace {

constexpr std::int64_t channels = 64, pixels = 56 * 56;

void train(syncnorm::nccl_communicator const& comm, syncnorm::thread_communicator const& thread) {
  cudaSetDevice(comm.rank());
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  std::int64_t const samples = 2 + comm.rank(); // ranks may differ, and one may have none
  float* memory = nullptr;
  auto const elements = samples * channels * pixels;
  cudaMalloc(reinterpret_cast<void**>(&memory), 4 * sizeof(float) * static_cast<std::size_t>(elements));
  cudaMemset(memory, 0, 4 * sizeof(float) * static_cast<std::size_t>(elements));
  auto const view = [&](int i) { return syncnorm::nchw(memory + i * elements, samples, channels, pixels); };
  auto const x = view(0), y = view(1), dy = view(2), dx = view(3);
  {
    syncnorm::cuda::batch_norm<float, syncnorm::nccl_communicator> layer{comm, channels};
    thread.barrier();                  // ranks of one process allocate and free nothing while others exchange
    layer.forward(x, y, stream);       // two kernels and one allgather, enqueued; the ranks agree in the first pass
    layer.backward(x, dy, dx, stream); // the same
    layer.synchronize(stream);

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t step = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    layer.forward(x, y, stream);
    layer.backward(x, dy, dx, stream);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&step, graph, 0);
    for (int i = 0; i < 10; ++i) cudaGraphLaunch(step, stream);
    layer.synchronize(stream); // throws what went wrong in a step, the same on every rank
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    thread.barrier();
  }
  cudaFree(memory);
  cudaStreamDestroy(stream);
}

} // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU");
    return 77;
  }
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(devices));
  if (ncclCommInitAll(comms.data(), devices, nullptr) != ncclSuccess) return 1;
  syncnorm::run_ranks(devices, [&](syncnorm::thread_communicator const& thread) {
    train(syncnorm::nccl_communicator::adopt(comms[static_cast<std::size_t>(thread.rank())]), thread);
  });
  std::printf("trained on %d GPUs\n", devices);
  return 0;
}
