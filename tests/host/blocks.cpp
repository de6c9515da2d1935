#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/backward_in_blocks.hpp>
#include <syncnorm/host/forward_in_blocks.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

namespace {

/// One block, several, a last one of another extent; rows, columns and elements; blocks that exceed the cache.
constexpr test::extents block_shapes[] = {{2, 7, 5},  {64, 9, 441}, {500, 600, 1}, {2, 2, 80000}, {2000, 40, 4},
                                          {32, 1, 1}, {2, 9, 4111}, {30, 2707, 2}, {0, 40, 9},    {3, 0, 4}};

template <class T>
struct results {
  std::vector<double> mean, m2, inv_std, sum_dy, sum_dy_xmu;
  std::vector<T> y, dx;

  explicit results(std::int64_t channels)
      : mean(static_cast<std::size_t>(channels), -1), m2(mean), inv_std(mean), sum_dy(mean), sum_dy_xmu(mean) {}
  friend bool operator==(results const&, results const&) = default;
};

} // namespace

TEST_CASE("in evaluation dy's rows are taken for channels where x's cannot be") {
  // On a thread of its own, whose scratch memory has not grown yet: it holds what a block's map needs, and no more.
  std::jthread const fresh{[] {
    for (auto const& shape : {test::extents{2, 63, 63}, {2, 150, 100}, {40, 63, 21}}) {
      std::int64_t const n = shape.n, c = shape.c, s = shape.s;
      CAPTURE(test::name_of(shape));
      test::tensor<float> x{test::arrangement::nhwc, n, c, s, test::deviates<float>(n, c, s, 1)},
          dy{test::arrangement::nchw, n, c, s, test::deviates<float>(n, c, s, 2)}, dx{test::arrangement::nchw, n, c, s},
          y = x;
      batch_norm<float, self_communicator> layer{{}, c};
      layer.eval();
      layer.forward(x.input(), y.view());
      layer.backward(x.input(), dy.input(), dx.view());
      auto expected = dy.values();
      for (auto& each : expected) each *= static_cast<float>(1 / std::sqrt(1 + 1e-5));
      auto const close = [](float a, float b) {
        return std::abs(a - b) <= 2 * std::numeric_limits<float>::epsilon() * std::abs(b);
      };
      CHECK(std::ranges::equal(dx.values(), expected, close));
    }
  }};
}

TEST_CASE_TEMPLATE(
    "a backward pass in blocks by constant statistics gives the bits of whole passes, whatever it writes over", T,
    float, double) {
  host::serial_executor const serial;
  for (auto const& shape : block_shapes) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    if (test::sanitized && n * c * s * static_cast<std::int64_t>(sizeof(T)) > 1'100'000) continue;
    auto const values = test::deviates<T>(n, c, s, 3), gradients = test::deviates<T>(n, c, s, 4);
    std::vector<T> gamma(static_cast<std::size_t>(c));
    results<T> whole{c};
    for (std::size_t i = 0; i < gamma.size(); ++i) {
      gamma[i] = T(0.5) - static_cast<T>(i % 7);
      whole.mean[i] = static_cast<double>(i % 5) - 2, whole.inv_std[i] = 1 / static_cast<double>(1 + i % 3);
    }
    host::channel_values const weight{std::span<T const>{gamma}};
    for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc, test::arrangement::every_other}) {
      if (order == test::arrangement::every_other && n * c * s > 100) continue;
      CAPTURE(test::name_of(shape));
      CAPTURE(test::name_of(order));
      test::tensor<T> x{order, n, c, s, values}, dy{order, n, c, s, gradients};
      test::tensor<T> expected{order, n, c, s};
      host::backward_reduce(serial, dy.input(), x.view(), whole.mean, whole.sum_dy, whole.sum_dy_xmu);
      host::backward_elemt(serial, dy.view(), x.view(), expected.view(), whole.mean, whole.inv_std, weight,
                           whole.sum_dy, whole.sum_dy_xmu, 0);
      auto const check = [&](auto const& exec, host::stores how) {
        auto const backward = [&](test::tensor<T>& of_dy, test::tensor<T>& of_x, test::tensor<T>& to) {
          results<T> got{c};
          host::backward_in_blocks(exec, of_dy.view(), of_x.view(), to.view(), whole.mean, whole.inv_std, weight,
                                   got.sum_dy, got.sum_dy_xmu, 0, how);
          CHECK(got.sum_dy == whole.sum_dy);
          CHECK(got.sum_dy_xmu == whole.sum_dy_xmu);
          CHECK(to.values() == expected.values());
          CHECK(to.intact());
        };
        test::tensor<T> apart{order, n, c, s}, over_dy = dy, over_x = x;
        backward(dy, x, apart);
        backward(over_dy, x, over_dy);
        backward(dy, over_x, over_x);
      };
      for (auto const how : {host::stores::automatic, host::stores::streaming}) {
        check(serial, how);
        check(test::shuffling_executor{2}, how);
      }
    }
  }
}

TEST_CASE_TEMPLATE("working in blocks gives the bits of whole passes", T, float, double) {
  for (auto const& shape : block_shapes) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    if (test::sanitized && n * c * s * static_cast<std::int64_t>(sizeof(T)) > 1'100'000) continue;
    auto const values = test::deviates<T>(n, c, s, 1), gradients = test::deviates<T>(n, c, s, 2);
    std::vector<T> const gamma(static_cast<std::size_t>(c), T(1.5)), beta(static_cast<std::size_t>(c), T(-0.25));
    affine_parameters<T> const params{gamma, beta};
    auto const count = n * s;
    for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc, test::arrangement::every_other}) {
      if (order == test::arrangement::every_other && n * c * s > 100) continue; // as any strides, but slow
      test::tensor<T> x{order, n, c, s, values}, dy{order, n, c, s, gradients}, y{order, n, c, s}, dx{order, n, c, s};
      results<T> whole{c};
      auto const finish_into = [count](results<T>& r) {
        return [&r, count](std::int64_t first, std::int64_t length) {
          for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(first + length); ++i)
            r.inv_std[i] = 1 / std::sqrt(r.m2[i] / static_cast<double>(std::max<std::int64_t>(1, count)) + 1e-5);
        };
      };
      host::serial_executor const serial;
      host::local_moments(serial, x.input(), whole.mean, whole.m2);
      finish_into(whole)(0, c);
      host::normalize(serial, x.view(), y.view(), whole.mean, whole.inv_std, params);
      host::backward_reduce(serial, dy.input(), x.view(), whole.mean, whole.sum_dy, whole.sum_dy_xmu);
      host::backward_elemt(serial, dy.view(), x.view(), dx.view(), whole.mean, whole.inv_std, params.gamma,
                           whole.sum_dy, whole.sum_dy_xmu, count);
      whole.y = y.values();
      whole.dx = dx.values();

      auto const check = [&](auto const& exec, host::stores how) {
        results<T> got{c};
        test::tensor<T> y_got{order, n, c, s}, dx_got{order, n, c, s}, in_place = x, dx_in_place = dy;
        host::forward_in_blocks(exec, x.view(), y_got.view(), got.mean, got.m2, got.inv_std, params, finish_into(got),
                                how);
        host::backward_in_blocks(exec, dy.input(), x.view(), dx_got.view(), got.mean, got.inv_std, params.gamma,
                                 got.sum_dy, got.sum_dy_xmu, count, how);
        got.y = y_got.values();
        got.dx = dx_got.values();
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        // Compared by parts: one long comparison would say nothing.
        CHECK(got.mean == whole.mean);
        CHECK(got.m2 == whole.m2);
        CHECK(got.sum_dy == whole.sum_dy);
        CHECK(got.sum_dy_xmu == whole.sum_dy_xmu);
        CHECK(got == whole);
        CHECK(y_got.intact());
        CHECK(dx_got.intact());

        host::forward_in_blocks(exec, in_place.view(), in_place.view(), got.mean, got.m2, got.inv_std, params,
                                finish_into(got), how);
        CHECK(in_place.values() == whole.y);
        host::backward_in_blocks(exec, dx_in_place.input(), x.view(), dx_in_place.view(), got.mean, got.inv_std,
                                 params.gamma, got.sum_dy, got.sum_dy_xmu, count, how);
        CHECK(dx_in_place.values() == whole.dx);
      };
      check(serial, host::stores::automatic);
      if (order != test::arrangement::every_other) check(test::shuffling_executor{2}, host::stores::streaming);
    }
  }
}
