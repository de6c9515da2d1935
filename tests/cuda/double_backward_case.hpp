#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>

#include "cuda/layer_cases.hpp"
#include "cuda/micro_batch_case.hpp"
#include "support/second_order_case.hpp"

namespace layer_cases {

/// A problem whose numbers are those of floats.
inline test::second_order_case second_order_of(std::vector<std::int64_t> const& shares, bool with_epilogue) {
  test::second_order_case problem{shares};
  problem.eps = 0.125;
  for (auto* const values : {&problem.x, &problem.dy, &problem.u, &problem.v, &problem.residual, &problem.gamma,
                             &problem.beta, &problem.a, &problem.b})
    for (double& value : *values) value = static_cast<double>(static_cast<float>(value));
  problem.unbiased = with_epilogue;
  if (with_epilogue) problem.with_epilogue(0.25, true, true, true);
  return problem;
}

/// Steps with double backward passes over micro-batches, enqueued or replayed, against differences of the oracle's loss. Where
/// every rank has one micro-batch, by the members for one batch. Every rank calls it.
template <class Layer, class C>
void check_double_backward(C const& comm, micro_batch_share const& shares, test::layout order, bool with_epilogue,
                           bool captured, syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  std::vector<std::int64_t> samples;
  bool single = true;
  for (auto const& share : shares) {
    samples.push_back(std::accumulate(share.begin(), share.end(), std::int64_t{0}));
    single = single && share.size() == 1;
  }
  auto problem = second_order_of(samples, with_epilogue);
  std::int64_t const c = problem.channels, s = problem.spatial, first = problem.first_of(rank);
  INFO("rank ", rank, " of ", shares.size(), " with ", shares[rank].size(), " micro-batches, layout ",
       static_cast<int>(order), std::string{with_epilogue ? ", epilogue" : ""},
       std::string{captured ? ", captured" : ""});

  struct micro_batch {
    device_tensor<float> x, dy, u, v, residual, y, dx, dresidual, to_dy, to_x;
    test::device_buffer<std::uint8_t> mask;
  };
  std::vector<std::unique_ptr<micro_batch>> batches;
  std::vector<syncnorm::tensor_view<float const>> x, dy, u, v;
  std::vector<syncnorm::tensor_view<float>> y, dx, dresidual, to_dy, to_x;
  std::vector<syncnorm::batch_norm_epilogue<float>> epilogues;
  std::int64_t from = first;
  for (auto const n : shares[rank]) {
    auto const tensor = [&] { return device_tensor<float>{order, n, c, s}; };
    auto const bytes = problem.mask.begin() + (with_epilogue ? from * s : 0);
    batches.push_back(std::unique_ptr<micro_batch>(new micro_batch{
        tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), tensor(),
        test::device_buffer{std::vector<std::uint8_t>(bytes, bytes + (with_epilogue ? n * s : 0))}}));
    auto& k = *batches.back();
    auto const put = [&](device_tensor<float>& to, std::vector<double> const& values) {
      to.put({values.begin(), values.end()}, from);
    };
    put(k.x, problem.x), put(k.dy, problem.dy), put(k.u, problem.u), put(k.v, problem.v);
    put(k.residual, problem.residual);
    x.push_back(k.x.view), dy.push_back(k.dy.view), u.push_back(k.u.view), y.push_back(k.y.view);
    dx.push_back(k.dx.view), to_dy.push_back(k.to_dy.view), to_x.push_back(k.to_x.view);
    auto& epilogue = epilogues.emplace_back();
    if (with_epilogue) {
      v.push_back(k.v.view), dresidual.push_back(k.dresidual.view);
      epilogue.activation.negative_slope = problem.slope;
      epilogue.residual = k.residual.view;
      epilogue.mask = syncnorm::mask_of(k.mask.data(), n, s);
      epilogue.masked = syncnorm::masked_outputs::zero;
    }
    from += n;
  }
  auto const of_rank = [&](std::vector<double> const& values) {
    auto const begin = values.begin() + static_cast<std::int64_t>(rank) * c;
    return test::device_buffer<float>{{begin, begin + c}};
  };
  test::device_buffer<float> const a = of_rank(problem.a), b = of_rank(problem.b);

  syncnorm::batch_norm_options norm{.eps = problem.eps, .exchange = policy};
  if (problem.unbiased) norm.normalize_by = syncnorm::batch_variance::unbiased;
  Layer layer{comm, c, {.norm = norm}};
  test::copy_to_device(layer.gamma().data(), std::vector<float>(problem.gamma.begin(), problem.gamma.end()).data(),
                       layer.gamma().size_bytes());
  test::copy_to_device(layer.beta().data(), std::vector<float>(problem.beta.begin(), problem.beta.end()).data(),
                       layer.beta().size_bytes());
  test::stream const on;
  if (captured) {
    layer.prepare(on);
    layer.reserve_double_backward();
  }
  auto const step = [&](cudaStream_t stream) {
    layer.forward(x, y, epilogues, stream);
    layer.backward(x, dy, dx, epilogues, dresidual, {}, stream);
    layer.zero_grad(stream);
    for (int time = 0; time < 2; ++time) // to gamma it adds
      if (single)
        layer.double_backward({u[0], a.span(), b.span(), with_epilogue ? v[0] : syncnorm::tensor_view<float const>{}},
                              x[0], dy[0], to_dy[0], to_x[0], epilogues[0], {}, stream);
      else
        layer.double_backward({u, a.span(), b.span(), v}, x, dy, to_dy, to_x, epilogues, {}, stream);
  };
  test::run_on(on, captured, step);
  layer.synchronize(on);

  from = first;
  for (std::size_t k = 0; k < batches.size(); ++k) {
    INFO("micro-batch ", k);
    auto const slopes = [&](std::vector<double>& of) {
      std::vector<double> all;
      for (auto i = from * c * s; i < (from + shares[rank][k]) * c * s; ++i)
        all.push_back(problem.slope_of(of[static_cast<std::size_t>(i)]));
      return all;
    };
    CHECK(error_of(batches[k]->to_dy.get(), slopes(problem.dy)) < 1e-5);
    CHECK(error_of(batches[k]->to_x.get(), slopes(problem.x)) < 1e-5);
    from += shares[rank][k];
  }
  std::vector<double> to_gamma;
  for (double& gamma : problem.gamma) to_gamma.push_back(2 * problem.slope_of(gamma, static_cast<int>(rank)));
  CHECK(error_of(get(layer.gamma_grad()), to_gamma) < 1e-5);
}

} // namespace layer_cases
