// Batch norm of one GPU beside a copy of the same bytes, as lines of JSON: forward, backward, and a step of both replayed from
// a graph. peers.py writes the same lines for torch's kernels.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cuda/timing.cuh>
#include <syncnorm/syncnorm.cuh>

namespace {

using bench::require_cuda;

/// As many sets of tensors as it takes for a set to be out of the cache when it comes again.
constexpr std::size_t all_sets_bytes = std::size_t{512} << 20;

struct shape {
  std::int64_t n, c, s;
};

template <class T>
struct tensors {
  bench::device_array x, y, dy, dx;

  explicit tensors(std::size_t bytes) : x{bytes}, y{bytes}, dy{bytes}, dx{bytes} {}
};

/// The time of a copy of two tensors, x to y and dy to dx.
template <class T>
double copy_us(cudaStream_t stream, std::vector<tensors<T>> const& sets) {
  auto const copy = [&](bench::device_array const& to, bench::device_array const& from) {
    require_cuda(
        cudaMemcpyAsync(to.as<std::byte>(), from.as<std::byte>(), to.bytes(), cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
  };
  return bench::median_us(stream, 15, 20, [&](int i) {
    auto const& set = sets[static_cast<std::size_t>(i) % sets.size()];
    copy(set.y, set.x);
    copy(set.dx, set.dy);
  });
}

template <class T>
void measure(char const* element, shape const& of, bool channels_last, cudaStream_t stream) {
  auto const bytes = static_cast<std::size_t>(of.n * of.c * of.s) * sizeof(T);
  std::vector<tensors<T>> sets;
  for (std::size_t all = 0; all < all_sets_bytes || sets.size() < 2; all += 4 * bytes) sets.emplace_back(bytes);
  auto const view = [&](bench::device_array const& data) {
    auto* const first = data.as<T>();
    return channels_last ? syncnorm::nhwc(first, of.n, of.c, of.s) : syncnorm::nchw(first, of.n, of.c, of.s);
  };
  syncnorm::cuda::batch_norm<T> layer{{}, of.c};
  auto const forward = [&](int i) {
    auto const& set = sets[static_cast<std::size_t>(i) % sets.size()];
    layer.forward(view(set.x), view(set.y), stream);
  };
  auto const backward = [&](int i) {
    auto const& set = sets[static_cast<std::size_t>(i) % sets.size()];
    layer.backward(view(set.x), view(set.dy), view(set.dx), stream);
  };
  auto const row = [&](char const* what, double us, double floor_us) {
    std::printf("{\"who\": \"syncnorm\", \"what\": \"%s\", \"element\": \"%s\", \"layout\": \"%s\", \"shape\": [%lld, "
                "%lld, %lld], \"us\": %.3f, \"copy_us\": %.3f}\n",
                what, element, channels_last ? "nhwc" : "nchw", static_cast<long long>(of.n),
                static_cast<long long>(of.c), static_cast<long long>(of.s), us, floor_us);
    std::fflush(stdout);
  };
  // A copy of two tensors moves as many bytes as four tensors have; x and y are two, dy, x and dx are three.
  auto const copy = copy_us(stream, sets);
  row("forward", bench::median_us(stream, 15, 20, forward), copy * 2 / 4);
  row("backward", bench::median_us(stream, 15, 20, backward), copy * 3 / 4);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  forward(0);
  backward(0);
  require_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require_cuda(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
  row("step in a graph, one set",
      bench::median_us(stream, 15, 20, [&](int) { require_cuda(cudaGraphLaunch(step, stream), "cudaGraphLaunch"); }),
      copy * 5 / 4);
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
  layer.synchronize(stream);
}

void measure_all(bool quick) {
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  std::vector<shape> shapes{{64, 256, 56 * 56}, {256, 64, 112 * 112}, {32, 512, 28 * 28}, {8192, 4096, 1}};
  if (quick) shapes = {{32, 512, 28 * 28}};
  for (auto const& of : shapes)
    for (bool const channels_last : {false, true}) {
      if (of.s == 1 && channels_last) continue;
      measure<float>("float", of, channels_last, stream);
      measure<__half>("float16", of, channels_last, stream);
      measure<__nv_bfloat16>("bfloat16", of, channels_last, stream);
    }
  // The grid of a course's report: small layers, whose time is that of launches.
  for (std::int64_t const batch : {32, 64})
    for (std::int64_t const channels : {128, 256, 512, 1024})
      measure<float>("float", {batch, channels, 1}, false, stream);
  cudaStreamDestroy(stream);
}

} // namespace

int main(int argc, char** argv) {
  try {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      std::fputs("bench.cuda: no GPU\n", stderr);
      return 77;
    }
    cudaDeviceProp properties{};
    require_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    std::printf("{\"gpu\": \"%s\"}\n", properties.name);
    measure_all(argc > 1 && std::string{argv[1]} == "--quick");
  } catch (std::exception const& e) {
    std::fprintf(stderr, "bench.cuda: %s\n", e.what());
    return 1;
  }
  return 0;
}
