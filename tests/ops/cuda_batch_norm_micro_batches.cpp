#include "ops/cuda_support.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include "cuda/double_backward_case.hpp"
#include "cuda/micro_batch_case.hpp"

using test::layer_over;

TEST_CASE("micro-batches by one statistic on a device agree with the oracle on their concatenation") {
  using test::layout;
  layer_cases::layer_case const plain{{}, 3, 9}, with_epilogue{{}, 5, 7, layout::nhwc, true, true, 0.25};
  auto uncounted = plain;
  uncounted.momentum = {};
  layer_cases::micro_batch_share const of_one{{1, 0, 3, 2}};
  layer_cases::check_micro_batches<layer_over<syncnorm::self_communicator>>(syncnorm::self_communicator{}, of_one,
                                                                            uncounted, true);
  for (auto const& shares :
       {layer_cases::micro_batch_share{{1, 5, 2}, {3}, {0, 2}}, layer_cases::micro_batch_share{{}, {2, 3, 1, 1}, {0}}})
    for (auto const& of : {uncounted, with_epilogue})
      test::over_nccl(3, [&](auto const& comm) {
        layer_cases::check_micro_batches<layer_over<test::nccl_communicator>>(comm, shares, of, of.masked);
      });
  test::check_no_violations();
}

TEST_CASE("double backward on a device agrees with the oracle, of one batch and over micro-batches") {
  using test::layout;
  test::unload_kernels();
  for (bool const with_epilogue : {false, true}) {
    for (auto const& shares : {layer_cases::micro_batch_share{{2}, {0}, {3}}, {{1, 2}, {}, {0, 1, 1}}})
      test::over_nccl(3, [&](auto const& comm) {
        layer_cases::check_double_backward<layer_over<test::nccl_communicator>>(comm, shares, layout::nchw,
                                                                                with_epilogue, true);
      });
    test::over_threads(2, [&](auto const& comm) {
      layer_cases::check_double_backward<layer_over<test::staged_threads>>(comm, {{2, 0, 1}, {1}}, layout::nhwc,
                                                                           with_epilogue, false);
    });
    for (auto const& shares : {layer_cases::micro_batch_share{{3}}, {{1, 2}}})
      layer_cases::check_double_backward<layer_over<syncnorm::self_communicator>>(
          syncnorm::self_communicator{}, shares, layout::nchw, with_epilogue, shares[0].size() == 2);
  }
  test::check_no_first_launches();
  test::check_no_violations();
}

TEST_CASE("positions whose outputs are 0 leave nothing in double backward on a device") {
  test::device_buffer<std::uint8_t> const mask{std::vector<std::uint8_t>{1, 0, 1, 1}};
  auto const run = [&](long double garbage, std::size_t where, float slope) {
    layer_cases::device_tensor<float> x{test::layout::nchw, 2, 1, 2}, dy{test::layout::nchw, 2, 1, 2},
        u{test::layout::nchw, 2, 1, 2}, y{test::layout::nchw, 2, 1, 2}, to_x{test::layout::nchw, 2, 1, 2};
    auto const of = [&](std::size_t tensor) { return tensor == where ? garbage : 0.25L; };
    x.put({1, of(0), 3, -2}, 0), dy.put({0.5, of(1), -1, 2}, 0), u.put({2, of(2), 1, -1}, 0);
    layer_over<syncnorm::self_communicator> layer{{}, 1};
    syncnorm::batch_norm_epilogue<float> const epilogue{.activation = syncnorm::activation::leaky_relu(slope),
                                                        .mask = syncnorm::mask_of(mask.data(), 2, 2),
                                                        .masked = syncnorm::masked_outputs::zero};
    test::stream const on;
    layer.forward(x.view, y.view, epilogue, on);
    layer.double_backward({.dx = u.view}, x.view, dy.view, y.view, to_x.view, epilogue, {}, on);
    layer.synchronize(on);
    auto all = y.get();
    auto const of_x = to_x.get();
    auto const of_gamma = layer_cases::get(layer.gamma_grad());
    all.insert(all.end(), of_x.begin(), of_x.end());
    all.insert(all.end(), of_gamma.begin(), of_gamma.end());
    return all;
  };
  for (float const slope : {1.0F, 0.5F})
    for (std::size_t where = 0; where < 3; ++where)
      for (long double const garbage : {std::numeric_limits<long double>::infinity(), std::nanl("")})
        CHECK(run(garbage, where, slope) == run(0.25L, 3, slope));
  test::check_no_violations();
}

TEST_CASE("what is not given to double backward on a device is not another times 0") {
  long double const infinity = std::numeric_limits<long double>::infinity();
  layer_over<syncnorm::self_communicator> layer{{}, 1};
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 1, 2}, dy{test::layout::nchw, 2, 1, 2},
      y{test::layout::nchw, 2, 1, 2}, to_x{test::layout::nchw, 2, 1, 2};
  x.put({1, 2, 3, -2}, 0), dy.put({0.5, infinity, -1, 2}, 0);
  test::stream const on;
  layer.forward(x.view, y.view, on);
  // Of the gradient of beta alone, which is linear in dy; gamma is 1.
  layer.double_backward({.beta_gradient = layer.gamma()}, x.view, dy.view, y.view, to_x.view, {}, {}, on);
  layer.synchronize(on);
  CHECK(y.get() == std::vector<long double>(4, 1));
  CHECK(to_x.get() == std::vector<long double>(4, 0));
  CHECK(layer_cases::get(layer.gamma_grad())[0] == 0);

  // By constant statistics dx is a multiple of dy alone.
  layer.eval();
  layer_cases::device_tensor<float> u{test::layout::nchw, 2, 1, 2};
  x.put({1, infinity, 3, -2}, 0), u.put({2, 1, -1, 3}, 0);
  layer.forward(x.view, y.view, on);
  layer.double_backward({.dx = u.view}, x.view, dy.view, y.view, to_x.view, {}, {}, on);
  layer.synchronize(on);
  auto const to_dy = y.get(), of_u = u.get();
  for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(to_dy[i] * of_u[0] - to_dy[0] * of_u[i]) < 1e-5);
  CHECK(to_x.get() == std::vector<long double>(4, 0));
  test::check_no_violations();
}

TEST_CASE("what is wrong with one micro-batch on a device on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 2};
    layer_cases::device_tensor<float> x{test::layout::nchw, 2, 2, 3}, y{test::layout::nchw, 2, 2, 3},
        more{test::layout::nchw, 2, 2, 3};
    x.put(std::vector<long double>(12, 1), 0), y.put(std::vector<long double>(12, -5), 0);
    test::stream const on;
    std::vector<syncnorm::tensor_view<float const>> xs{x.view, x.view}, dys{x.view, x.view};
    std::vector<syncnorm::tensor_view<float>> ys{y.view, more.view};
    auto const thrown = [&](auto const& f) {
      return test::thrown<syncnorm::invalid_argument_error>([&] {
        f();
        layer.synchronize(on);
      });
    };
    bool const here = comm.rank() == 1;
    auto bad = xs;
    if (here) bad[1].data = nullptr;
    CHECK(thrown([&] { layer.forward(bad, ys, {}, on); }) ==
          "batch_norm forward: rank 1: x[1] is null, its extents are [2, 2, 3]");
    auto few = ys;
    if (here) few.pop_back();
    CHECK(thrown([&] { layer.forward(xs, few, {}, on); }) ==
          "batch_norm forward: rank 1: there are 1 micro-batches of y, expected 2 as of x");
    auto same = ys;
    if (here) same[1] = y.view;
    CHECK(thrown([&] { layer.forward(xs, same, {}, on); }) ==
          "batch_norm forward: rank 1: y[1] and y[0] overlap in memory");
    std::vector<syncnorm::batch_norm_epilogue<float>> const one(here ? 1 : 2);
    CHECK(thrown([&] { layer.forward(xs, ys, one, on); }) ==
          "batch_norm forward: rank 1: there are 1 epilogues, expected 2 as micro-batches of x");
    CHECK(y.get() == std::vector<long double>(12, -5));
    layer.forward(xs, ys, {}, on);
    if (here) dys.pop_back();
    CHECK(thrown([&] { layer.backward(xs, dys, ys, {}, {}, {}, on); }) ==
          "batch_norm backward: rank 1: there are 1 micro-batches of dy, expected 2 as micro-batches of x");

    dys = xs;
    layer.backward(xs, dys, ys, {}, {}, {}, on);
    layer.synchronize(on);
    auto const gamma = layer_cases::get(layer.gamma_grad());
    auto const before = y.get();
    std::string const second = "batch_norm 2nd backward: rank 1: ";
    auto us = xs;
    if (here) us[1].samples = 1;
    CHECK(thrown([&] { layer.double_backward({.dx = us}, xs, dys, ys, {}, {}, {}, on); }) ==
          second + "the gradient with respect to dx[1] is [1, 2, 3], expected [2, 2, 3] as x");
    CHECK(thrown([&] { layer.double_backward({}, xs, dys, few, {}, {}, {}, on); }) ==
          second + "there are 1 micro-batches of the gradient to dy, expected 2 as micro-batches of x");
    auto inputs = ys;
    if (here) inputs[1] = x.view;
    CHECK(thrown([&] { layer.double_backward({}, xs, dys, {}, inputs, {}, {}, on); }) ==
          second + "the gradient to x[1] and dy[0] overlap in memory");
    CHECK(y.get() == before);
    CHECK(layer_cases::get(layer.gamma_grad()) == gamma);
  });
  test::check_no_violations();
}

TEST_CASE("a rank without micro-batches on a device adds nothing to gradients by constant statistics") {
  layer_over<syncnorm::self_communicator> layer{{}, 2};
  test::stream const on;
  layer.freeze_statistics();
  std::span<syncnorm::tensor_view<float const> const> const in;
  std::span<syncnorm::tensor_view<float> const> const out;
  layer.forward(in, out, {}, on);
  layer.backward(in, in, out, {}, {}, {}, on);
  layer.double_backward({}, in, in, out, out, {}, {}, on);
  layer.synchronize(on);
  for (auto const gradient : {layer.gamma_grad(), layer.beta_grad()})
    CHECK(layer_cases::get(gradient) == std::vector<float>(2, 0));
  test::check_no_violations();
}
