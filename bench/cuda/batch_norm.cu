// Batch norm of one GPU beside a copy of the same bytes, as lines of JSON: forward, backward, a step of both replayed from
// a graph, and each kernel of a rank among others. peers.py writes the same lines for torch's kernels.

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

/// What the kernels of a pass need besides tensors.
struct pass_memory {
  bench::device_array packet, work, mean, inv_std, count, fault;
  syncnorm::cuda::device_limits limits;
  syncnorm::detail::packet_header header;

  explicit pass_memory(std::int64_t channels, syncnorm::cuda::device_limits const& of_device)
      : packet{syncnorm::cuda::packet_bytes(channels)}, work{syncnorm::cuda::workspace_bytes(channels, of_device)},
        mean{static_cast<std::size_t>(channels) * sizeof(double)}, inv_std{mean.bytes()}, count{sizeof(std::int64_t)},
        fault{sizeof(std::uint32_t)}, limits{of_device} {
    header.channels = channels;
    for (auto const* const each : {&work, &fault})
      require_cuda(cudaMemset(each->as<std::byte>(), 0, each->bytes()), "cudaMemset");
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  [[nodiscard]] syncnorm::cuda::packet_place place() const { return {packet.as<std::byte>()}; }
  [[nodiscard]] syncnorm::cuda::saved_statistics saved() const {
    return {mean.as<double>(), inv_std.as<double>(), count.as<std::int64_t>()};
  }
  [[nodiscard]] syncnorm::cuda::workspace workspace() const { return {work.as<std::byte>(), work.bytes()}; }
  [[nodiscard]] syncnorm::cuda::fault_report report() const {
    return {fault.as<syncnorm::cuda::pass_fault>(), nullptr};
  }
};

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

  // Two kernels of a pass move more than a pass has to, so each is beside what it moves itself.
  namespace cuda = syncnorm::cuda;
  pass_memory const of_pass{of.c, cuda::current_limits()};
  auto const own = of_pass.place();
  auto const kernel = [&](char const* what, int tensors_moved, auto const& launch) {
    auto const run = [&](int i) { launch(sets[static_cast<std::size_t>(i) % sets.size()]); };
    row(what, bench::median_us(stream, 15, 20, run), copy * tensors_moved / 4);
  };
  kernel("local_moments", 1, [&](auto const& set) {
    cuda::local_moments<T>(view(set.x), {}, of_pass.header, own, of_pass.workspace(), of_pass.limits, stream);
  });
  kernel("normalize", 2, [&](auto const& set) {
    cuda::normalize<T>(view(set.x), view(set.y), {}, {}, {}, own_packet(own), of_pass.saved(), {}, of_pass.report(),
                       of_pass.workspace(), of_pass.limits, stream);
  });
  kernel("backward_reduce", 2, [&](auto const& set) {
    cuda::backward_reduce<T>(view(set.dy), view(set.x), {}, {}, of_pass.saved(), of_pass.header, own,
                             of_pass.workspace(), of_pass.limits, stream);
  });
  kernel("backward_elemt", 3, [&](auto const& set) {
    cuda::backward_elemt<T>(view(set.dy), view(set.x), view(set.dx), {}, {}, {}, of_pass.saved(), own_packet(own), own,
                            {}, of_pass.report(), of_pass.limits, stream);
  });

  kernel("backward_constant", 2, [&](auto const& set) {
    cuda::backward_constant<T>(view(set.dy), view(set.x), view(set.dx), {}, {}, {}, of_pass.saved(), of_pass.limits,
                               stream);
  });

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
  std::vector<shape> shapes{{64, 256, 56 * 56},   {256, 64, 112 * 112}, {32, 512, 28 * 28},
                            {256, 1024, 14 * 14}, {256, 2048, 7 * 7},   {8192, 4096, 1}};
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
