#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/layer_cases.hpp"
#include "ops/cuda_support.hpp"

namespace test {

/// The tensors of a step on one rank.
struct step_memory {
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, y{test::layout::nchw, 2, 3, 5},
      dy{test::layout::nchw, 2, 3, 5}, dx{test::layout::nchw, 2, 3, 5};
  std::vector<float> on_host = std::vector<float>(30, 1);
  test::device_buffer<std::uint8_t> mask{std::vector<std::uint8_t>(10, 1)};
  syncnorm::batch_norm_epilogue<float> epilogue;

  step_memory() {
    std::vector<long double> values(30);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
    x.put(values, 0), dy.put(values, 0);
    y.put(std::vector<long double>(30, -5), 0), dx.put(std::vector<long double>(30, -6), 0);
  }
  template <class Layer>
  void forward(Layer& layer, test::stream const& on) {
    layer.forward(x.view, y.view, epilogue, on);
  }
  template <class Layer>
  void backward(Layer& layer, test::stream const& on) {
    layer.backward(x.view, dy.view, dx.view, epilogue, {}, {}, on);
  }
};

/// What a pass that failed leaves as it was, of a layer; the counter first.
template <class Layer>
std::vector<float> state_of(Layer& layer) {
  std::vector<float> all{static_cast<float>(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0])};
  for (auto const values : {layer.running_mean(), layer.running_var(), layer.gamma_grad(), layer.beta_grad()}) {
    auto const some = layer_cases::get(values);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

} // namespace test
