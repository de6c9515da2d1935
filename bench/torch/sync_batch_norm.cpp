// The module of libtorch on one rank, beside libtorch's own. Both allocate their results in every step.

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <syncnorm/torch/sync_batch_norm.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"

namespace {

constexpr int threads = 2;

torch::Tensor wrap(bench::row_key const& key, bench::buffer<float> const& data) {
  auto const [n, c, s] = key.shape;
  if (key.layout == "NHWC") return torch::from_blob(data.data(), {n, c, s, 1}, {s * c, 1, c, c}, torch::kFloat);
  return torch::from_blob(data.data(), {n, c, s, 1}, torch::kFloat);
}

/// Steps of a module, with gradients of its input and parameters where the row has a backward pass.
template <class Module>
bench::contender::step step_of(bench::row_key const& key, bench::rank_tensors<float> const& data) {
  Module module{torch::nn::BatchNormOptions{key.shape[1]}};
  auto const& tensor = data->front();
  bool const backward = bench::passes{key}.backward;
  auto const x = wrap(key, tensor.x).requires_grad_(backward), dy = wrap(key, tensor.dy);
  return [=](int) mutable {
    torch::AutoGradMode const recording{backward};
    auto const y = module->forward(x);
    if (backward) torch::autograd::grad({y}, {x, module->weight, module->bias}, {dy});
  };
}

void add(std::vector<bench::row>& rows, std::string const& layout, std::array<std::int64_t, 3> const& shape) {
  for (char const* op : {"forward+module", "forward+backward+module"}) {
    bench::row_key const key{op, layout, bench::type_name<float>(), shape, "self", 1, threads};
    auto const make = [key] {
      auto const data = bench::make_tensors<float>(key);
      // Of the first steps the system may have to find the memory anew that the peer has had meanwhile.
      std::int64_t const settling = 4;
      auto const steps = std::max<std::int64_t>(8, bench::iterations_for(bench::floor_bytes<float>(key)));
      std::vector<bench::contender> contenders{
          {"ours", [=] { return step_of<syncnorm::torch::SyncBatchNorm>(key, data); }, steps, settling},
          {"torch", [=] { return step_of<torch::nn::BatchNorm2d>(key, data); }, steps / 2, settling / 2}};
      bench::add_floors<float>(contenders, key, bench::traffic_of(key), bench::tensors_of<float>(data));
      return contenders;
    };
    rows.push_back({key, bench::floor_bytes<float>(key), make});
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv);
    at::set_num_threads(threads);
    std::vector<bench::row> rows;
    if (!how.quick) add(rows, "NCHW", {32, 64, 12544});
    add(rows, "NCHW", {32, 256, 3136});
    if (!how.quick) {
      add(rows, "NCHW", {32, 512, 784});
      add(rows, "NHWC", {32, 256, 3136});
      add(rows, "NCHW", {32, 2048, 49});
    }
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.torch: " << error.what() << '\n';
    return 1;
  }
}
