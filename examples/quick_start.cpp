// Four ranks as threads, each with a batch of its own size, normalize by the statistics of all of them.

#include <cmath>
#include <cstdio>
#include <span>
#include <vector>

#include <syncnorm/syncnorm.hpp>

int main() {
  constexpr std::int64_t channels = 3, pixels = 8 * 8;
  bool passed = true;
  syncnorm::run_ranks(4, [&](syncnorm::thread_communicator const& comm) {
    std::int64_t const samples = 2 * comm.rank(); // rank 0 has none, and takes part all the same
    std::vector<float> x(static_cast<std::size_t>(samples * channels * pixels)), y(x.size()), dy(x.size(), 1),
        dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 100 + std::sin(static_cast<float>(i + 7 * x.size()));
    auto const view = [&](std::vector<float>& values) {
      return syncnorm::nchw(values.data(), samples, channels, pixels);
    };

    syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, channels};
    layer.forward(view(x), view(y));
    layer.backward(view(x), view(dy), view(dx));

    std::vector<double> sums(2); // over all ranks, y has mean 0 and variance 1
    for (float const value : y) sums[0] += value, sums[1] += value * value;
    syncnorm::allreduce(comm, sums, std::span<double>{sums});
    auto const count = static_cast<double>(channels * layer.saved().count);
    if (comm.rank() == 0) {
      std::printf("mean %.6f, variance %.6f, running mean of channel 0: %.4f\n", std::abs(sums[0] / count),
                  sums[1] / count, layer.running_mean()[0]);
      passed = std::abs(sums[0] / count) < 1e-5 && std::abs(sums[1] / count - 1) < 1e-3;
    }
  });
  return passed && std::fflush(stdout) == 0 ? 0 : 1;
}
