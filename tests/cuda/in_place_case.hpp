#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

#include "cuda/layer_cases.hpp"

namespace layer_cases {

template <class P>
void put(std::span<P> to, std::vector<long double> const& values) {
  std::vector<P> const all(values.begin(), values.end());
  test::copy_to_device(to.data(), all.data(), to.size_bytes());
}

enum class dx_over : std::uint8_t { neither, y, dy };

/// Two steps in place, enqueued or replayed, against the oracle; of dx over y or dy, which take x or dy away, one. Channels are in
/// turn one that is recovered, one of a small gamma, one of a large beta, and again one that is recovered. Every rank calls it.
template <class Layer, class T = float, class C>
void check_in_place(C const& comm, layer_case const& of, bool captured, dx_over where, bool eval = false,
                    double accuracy = 3e-5) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm), steps = where == dx_over::neither ? 2 : 1;
  std::int64_t first = 0, all = 0;
  for (int r = 0; r < size; ++r) {
    if (r < rank) first += of.samples[static_cast<std::size_t>(r)];
    all += of.samples[static_cast<std::size_t>(r)];
  }
  auto const own = of.samples[static_cast<std::size_t>(rank)], c = of.channels, s = of.spatial;
  INFO("in place, rank ", rank, " of ", size, ", C ", c, ", layout ", static_cast<int>(of.order), ", slope ", of.slope,
       ", dx over ", static_cast<int>(where), std::string{captured ? ", captured" : ""});
  auto const batch = [&](std::uint64_t stream, double center) {
    std::vector<long double> values(static_cast<std::size_t>(all * c * s));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(static_cast<T>(static_cast<float>(center + test::noise(stream, i))));
    return values;
  };
  test::epilogue_oracle oracle{all, c, s, batch(1, eval ? 0 : 1), {}, {}, {}, {}};
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < c; ++i) {
    oracle.gamma.push_back(i % 4 == 1 ? 0x1p-10L : i % 4 == 3 ? -1.5L : 0.75L);
    oracle.beta.push_back(i % 4 == 2 ? 50 : 0.5L);
    kept += of.slope <= 0 || i % 4 == 1 || i % 4 == 2 ? 1 : 0;
  }
  if (of.residual) oracle.residual = batch(2, 0);
  oracle.slope = of.slope;
  oracle.eps = 1e-5L;
  oracle.forward();
  if (eval) {
    oracle.mean.assign(oracle.mean.size(), 0);
    oracle.inv_std.assign(oracle.mean.size(), 1 / std::sqrt(1 + oracle.eps));
    oracle.constant_statistics();
  }
  auto dy_all = batch(4, 0.25);
  oracle.for_each_near_kink(1e-4L, [&](std::size_t i) { dy_all[i] = 0; });
  auto const gradients = oracle.backward(dy_all, first, first + own);

  device_tensor<T> x{of.order, own, c, s}, dy{of.order, own, c, s}, dx{of.order, own, c, s},
      residual{of.order, own, c, s}, dresidual{of.order, own, c, s};
  x.put(oracle.x, first), dy.put(dy_all, first);
  if (of.residual) residual.put(oracle.residual, first);
  syncnorm::batch_norm_epilogue<T> epilogue{{of.slope}};
  if (of.residual) epilogue.residual = residual.view;

  Layer layer{comm, c};
  put(layer.gamma(), oracle.gamma), put(layer.beta(), oracle.beta);
  if (eval) layer.eval();
  auto const into = where == dx_over::y ? x.view : where == dx_over::dy ? dy.view : dx.view;
  std::vector<long double> y;
  test::stream const on;
  auto const step = [&](cudaStream_t stream) {
    layer.forward_in_place(x.view, epilogue, stream);
    if (!captured) on.wait(), y = x.get();
    layer.backward_in_place(x.view, dy.view, into, epilogue, of.residual ? dresidual.view : syncnorm::tensor_view<T>{},
                            {}, stream);
  };
  if (captured) {
    layer.prepare(on);
    layer.reserve_in_place(x.view, epilogue.activation, 0, on);
    CHECK(layer.kept().room() == kept);
  }
  test::run_on(on, captured, step, steps);
  layer.synchronize(on);

  auto const part = [&](std::vector<long double> const& values) {
    auto const from = values.begin() + first * c * s;
    return std::vector<long double>(from, from + own * c * s);
  };
  if (!captured) CHECK(error_of(y, part(oracle.y)) < accuracy);
  auto& written = where == dx_over::y ? x : where == dx_over::dy ? dy : dx;
  CHECK(error_of(written.get(), part(gradients.dx)) < accuracy);
  if (of.residual) CHECK(error_of(dresidual.get(), part(gradients.dresidual)) < accuracy);
  if (where != dx_over::y) CHECK(error_of(x.get(), part(oracle.x)) < accuracy);
  auto gamma = gradients.gamma;
  for (auto& value : gamma) value *= steps;
  CHECK(error_of(get(layer.gamma_grad()), gamma) < accuracy);
  if (own * s > 0) CHECK(get(std::span{layer.kept().memory().state, 1}) == std::vector<std::int64_t>{kept});
}

/// Identity, leaky ReLU over a residual, and ReLU, whose channels are all kept; C as of layers, and of no pack's length.
inline std::vector<layer_case> in_place_cases() {
  using test::layout;
  return {{{3, 2, 4}, 6, 20},
          {{2, 0, 3}, 9, 7, layout::nhwc, false, true, 0.25},
          {{1, 2, 1}, 5, 33, layout::strided, false, false, -0.5},
          {{2, 1, 2}, 4, 9, layout::tbc, false, true, 0}};
}

} // namespace layer_cases
