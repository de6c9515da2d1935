#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>

#include "cuda/layer_cases.hpp"

namespace layer_cases {

/// A step with its double backward pass, beside the same of a layer of the host over comm.host(). Every rank calls it.
template <class Layer, class C>
void check_double_backward(C const& comm, bool with_epilogue) {
  std::int64_t const n = 2 + comm.rank(), c = 3, s = 7;
  std::deque<device_tensor<float>> tensors; // x, dy, u, v, the residual, y, dx, dresidual, to dy, to x
  for (std::uint64_t i = 0; i < 10; ++i) {
    std::vector<long double> values(static_cast<std::size_t>(n * c * s));
    for (std::size_t k = 0; k < values.size(); ++k)
      values[k] = test::noise(10 * i + static_cast<std::uint64_t>(comm.rank()), k);
    tensors.emplace_back(test::layout::nhwc, n, c, s).put(values, 0);
  }
  std::vector<std::uint8_t> counts;
  for (std::int64_t k = 0; k < n * s; ++k) counts.push_back(k % 4 != 1);
  test::device_buffer<std::uint8_t> const mask{counts};
  test::device_buffer<float> const a{{0.5F, -1, 2}}, b{{1, 0.25F, -0.5F}};
  auto const on_host = [&](std::size_t i) { return tensors[i].host.view; };
  auto const on_device = [&](std::size_t i) { return tensors[i].view; };

  Layer layer{comm, c};
  syncnorm::batch_norm<float, std::remove_cvref_t<decltype(comm.host())>> host{comm.host(), c};
  test::stream const on;
  auto const step = [&](auto& of, auto const& view, float const* first, float const* second,
                        std::uint8_t const* counted, auto... stream) {
    syncnorm::batch_norm_epilogue<float> epilogue;
    if (with_epilogue) {
      epilogue.activation.negative_slope = 0.25;
      epilogue.residual = view(4);
      epilogue.mask = syncnorm::mask_of(counted, n, s);
      epilogue.masked = syncnorm::masked_outputs::zero;
    }
    of.forward(view(0), view(5), epilogue, stream...);
    of.backward(view(0), view(1), view(6), epilogue, with_epilogue ? view(7) : syncnorm::tensor_view<float>{},
                syncnorm::batch_norm_backward_options{}, stream...);
    syncnorm::batch_norm_second_order<float, float> const gradients{
        view(2), {first, 3}, {second, 3}, with_epilogue ? view(3) : syncnorm::tensor_view<float>{}};
    of.double_backward(gradients, view(0), view(1), view(8), view(9), syncnorm::batch_norm_backward_options{}, epilogue,
                       stream...);
  };
  auto const host_a = a.get(), host_b = b.get();
  step(layer, on_device, a.data(), b.data(), mask.data(), static_cast<cudaStream_t>(on));
  layer.synchronize(on);
  std::array const found{tensors[8].get(), tensors[9].get()};
  step(host, on_host, host_a.data(), host_b.data(), counts.data());
  for (std::size_t i = 0; i < 2; ++i) {
    auto& expected = tensors[8 + i];
    expected.memory.put(expected.host.storage);
    CHECK(error_of(found[i], expected.get()) < 1e-5);
  }
  auto const gamma = host.gamma_grad();
  CHECK(error_of(get(layer.gamma_grad()), std::vector<float>{gamma.begin(), gamma.end()}) < 1e-5);
}

} // namespace layer_cases
