#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

#include "cuda/layer_cases.hpp"

namespace layer_cases {

/// Samples of each micro-batch of each rank.
using micro_batch_share = std::vector<std::vector<std::int64_t>>;

/// Two steps over micro-batches, enqueued or replayed, against the oracle on all of them concatenated. Every rank calls it.
template <class Layer, class C>
void check_micro_batches(C const& comm, micro_batch_share const& shares, layer_case const& of, bool captured) {
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  auto const total = [](auto const& some) { return std::accumulate(some.begin(), some.end(), std::int64_t{0}); };
  std::int64_t all = 0, first = 0;
  for (std::size_t r = 0; r < shares.size(); ++r) {
    if (r == rank) first = all;
    all += total(shares[r]);
  }
  std::int64_t const c = of.channels, s = of.spatial, last = first + total(shares[rank]);
  INFO("rank ", rank, " of ", shares.size(), " with ", shares[rank].size(), " micro-batches, layout ",
       static_cast<int>(of.order), std::string{captured ? ", captured" : ""});
  auto const batch = [&](std::uint64_t stream, double center) {
    std::vector<long double> values(static_cast<std::size_t>(all * c * s));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(center + test::noise(stream, i));
    return values;
  };
  std::vector<long double> const ones(static_cast<std::size_t>(c), 1), zeros(ones.size(), 0);
  test::epilogue_oracle oracle{all, c, s, batch(1, 5), ones, zeros, {}, {}};
  if (of.residual) oracle.residual = batch(2, 0);
  for (std::int64_t i = 0; i < all * s && of.masked; ++i)
    oracle.mask.push_back(test::noise(3, static_cast<std::uint64_t>(i)) > -0.5);
  oracle.slope = of.slope, oracle.exponential = of.exponential;
  oracle.eps = 1e-5L;
  oracle.unbiased = of.normalize_by == syncnorm::batch_variance::unbiased;
  oracle.forward();
  auto dy_all = batch(4, 0.25);
  oracle.for_each_near_kink(1e-4L, [&](std::size_t i) { dy_all[i] = 0; });
  auto const gradients = oracle.backward(dy_all, first, last);

  struct micro_batch {
    device_tensor<float> x, y, dy, dx, residual, dresidual;
    test::device_buffer<std::uint8_t> mask;
  };
  std::vector<std::unique_ptr<micro_batch>> batches;
  std::vector<syncnorm::tensor_view<float const>> x, dy;
  std::vector<syncnorm::tensor_view<float>> y, dx, dresidual;
  std::vector<syncnorm::batch_norm_epilogue<float>> epilogues;
  std::int64_t from = first;
  for (auto const n : shares[rank]) {
    auto const tensor = [&] { return device_tensor<float>{of.order, n, c, s}; };
    std::vector<std::uint8_t> bytes;
    if (of.masked) bytes.assign(oracle.mask.begin() + from * s, oracle.mask.begin() + (from + n) * s);
    batches.push_back(std::unique_ptr<micro_batch>(
        new micro_batch{tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), test::device_buffer{bytes}}));
    auto& k = *batches.back();
    k.x.put(oracle.x, from), k.dy.put(dy_all, from);
    if (of.residual) k.residual.put(oracle.residual, from);
    x.push_back(k.x.view), dy.push_back(k.dy.view), y.push_back(k.y.view), dx.push_back(k.dx.view);
    dresidual.push_back(of.residual ? k.dresidual.view : syncnorm::tensor_view<float>{});
    auto& epilogue = epilogues.emplace_back();
    epilogue.activation = of.activation();
    if (of.residual) epilogue.residual = k.residual.view;
    if (of.masked) epilogue.mask = syncnorm::mask_of(k.mask.data(), n, s);
    from += n;
  }

  Layer layer{comm, c, {.norm = of.norm()}};
  test::stream const on;
  if (captured) layer.prepare(on);
  test::run_on(
      on, captured,
      [&](cudaStream_t stream) {
        layer.forward(x, y, epilogues, stream);
        layer.backward(x, dy, dx, epilogues, dresidual, {}, stream);
      },
      2);
  layer.synchronize(on);

  from = first;
  for (std::size_t k = 0; k < batches.size(); ++k) {
    INFO("micro-batch ", k);
    auto const part = [&](std::vector<long double> const& values) {
      auto const begin = values.begin() + from * c * s;
      return std::vector<long double>(begin, begin + shares[rank][k] * c * s);
    };
    CHECK(error_of(batches[k]->y.get(), part(oracle.y)) < 1e-5);
    CHECK(error_of(batches[k]->dx.get(), part(gradients.dx)) < 1e-5);
    if (of.residual) CHECK(error_of(batches[k]->dresidual.get(), part(gradients.dresidual)) < 1e-5);
    from += shares[rank][k];
  }
  auto gamma = gradients.gamma, beta = gradients.beta;
  std::vector<long double> mean(zeros), var(ones);
  for (std::size_t i = 0; i < mean.size(); ++i) {
    gamma[i] *= 2, beta[i] *= 2;
    for (int k = 0; k < 2; ++k) {
      long double const weight = of.momentum ? static_cast<long double>(*of.momentum) : 1.0L / (k + 1);
      mean[i] += weight * (oracle.mean[i] - mean[i]);
      var[i] += weight * (oracle.m2[i] / static_cast<long double>(oracle.count - 1) - var[i]);
    }
  }
  CHECK(error_of(get(layer.gamma_grad()), gamma) < 1e-5);
  CHECK(error_of(get(layer.beta_grad()), beta) < 1e-5);
  CHECK(error_of(get(layer.running_mean()), mean) < 1e-5);
  CHECK(error_of(get(layer.running_var()), var) < 1e-5);
  CHECK(get(std::span{layer.num_batches_tracked(), 1})[0] == 2);
  CHECK(get(std::span{layer.saved().statistics().count, 1})[0] == oracle.count);
}

} // namespace layer_cases
