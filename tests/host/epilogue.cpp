#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/masked_moments.hpp>

#include <host/epilogue_problem.hpp>
#include <host/tensors.hpp>

using namespace syncnorm;
using test::choices;
using test::counted;
using test::difference;
using test::epilogue_problem;
using test::for_each_problem;
using test::name_of;
using test::wide;

TEST_CASE_TEMPLATE("sums through an epilogue are as accurate wherever their operands lie", T, float, bfloat16) {
  for (std::int64_t const s : {500, 2048, 5000}) {
    for (auto const& chose : {choices[0], choices[1], choices[6]}) {
      epilogue_problem<T> p{{2, 3, s}, chose};
      // A gradient of one sign, whose sums grow.
      for (auto& value : p.dy) value = static_cast<float>(value) == 0 ? value : static_cast<T>(0.9902344F);
      auto const expected = p.oracle.backward(wide(p.dy), 0, p.n);
      for (auto const of_x : test::arrangements) {
        for (auto const of_dy : test::arrangements) {
          if (test::sanitized && of_dy != of_x && of_dy != test::arrangement::nhwc) continue;
          CAPTURE(s);
          CAPTURE(name_of(chose));
          CAPTURE(test::name_of(of_x));
          CAPTURE(test::name_of(of_dy));
          test::tensor<T> x{of_x, p.n, p.c, p.s, p.x}, dy{of_dy, p.n, p.c, p.s, p.dy};
          test::tensor<T> residual{of_dy, p.n, p.c, p.s, chose.residual ? p.residual : p.x};
          std::vector<double> sum_dy(3), sum_dy_xmu(3);
          host::backward_reduce(host::serial_executor{}, dy.input(), x.input(), p.mean, p.inv_std, p.params(),
                                host::prepared_epilogue<T>{p.epilogue(residual.input())}, sum_dy, sum_dy_xmu);
          CHECK(difference(sum_dy, expected.sum_dy, static_cast<long double>(2 * s) / 4) <= 5e-6);
          CHECK(difference(sum_dy_xmu, expected.sum_dy_xmu, static_cast<long double>(2 * s) / 4) <= 5e-6);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("outputs are activated, added to and masked as defined", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  std::size_t cells = 0;
  for_each_problem<T>([&](epilogue_problem<T> const& p) {
    for (auto const order : test::arrangements)
      for (auto const how : {host::stores::cached, host::stores::streaming}) {
        if (test::sanitized && cells++ % 3 > 0) continue;
        CAPTURE(test::name_of(order));
        std::int64_t const offset = how == host::stores::streaming ? 5 : 1;
        test::tensor<T> x{order, p.n, p.c, p.s, p.x}, y{order, p.n, p.c, p.s, offset};
        test::tensor<T> residual{order, p.n, p.c, p.s, p.chosen.residual ? p.residual : p.x};
        long double const scale =
            std::max(1.0L, std::abs(*std::ranges::max_element(p.oracle.y, {}, [](auto v) { return std::abs(v); })));
        auto const run = [&](auto const& exec, tensor_view<T> const& to) {
          host::normalize(exec, x.view(), to, p.mean, p.inv_std, p.params(), p.epilogue(residual.view()), how);
        };
        run(host::serial_executor{}, y.view());
        CHECK(difference(y.values(), p.oracle.y, scale) <= test::accuracy<T>);
        CHECK(y.intact());
        test::tensor<T> again{order, p.n, p.c, p.s, offset};
        run(test::shuffling_executor{2}, again.view());
        CHECK(again.values() == y.values());
        if (p.chosen.residual) {
          run(host::serial_executor{}, residual.view()); // y over the residual
          CHECK(difference(residual.values(), p.oracle.y, scale) <= test::accuracy<T>);
        } else {
          run(host::serial_executor{}, x.view());
          CHECK(difference(x.values(), p.oracle.y, scale) <= test::accuracy<T>);
          CHECK(x.intact());
        }
      }
  });
}

TEST_CASE_TEMPLATE("sums and gradients through an epilogue are the oracle's", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  double const accuracy = sizeof(T) == 8 ? 1e-12 : 1e-5;
  std::size_t cells = 0;
  for_each_problem<T>([&](epilogue_problem<T> const& p) {
    std::vector<long double> magnitude(p.mean.size(), 1);
    for (std::size_t i = 0; i < p.x.size(); ++i)
      magnitude[i / static_cast<std::size_t>(p.s) % magnitude.size()] +=
          std::abs(p.gradients.dresidual[i]) * (1 + std::abs(p.oracle.x[i]));
    long double const largest = *std::ranges::max_element(magnitude), scale = p.gradient_scale();
    for (auto const order : test::arrangements) {
      if (test::sanitized && cells++ % 2 > 0) continue;
      CAPTURE(test::name_of(order));
      test::tensor<T> x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy, 3};
      test::tensor<T> residual{order, p.n, p.c, p.s, p.chosen.residual ? p.residual : p.x};
      auto const epilogue = p.epilogue(residual.view());
      std::vector<double> sum_dy(p.mean.size(), -1), sum_dy_xmu(sum_dy), again(sum_dy), xmu_again(sum_dy);
      host::backward_reduce(host::serial_executor{}, dy.input(), x.view(), p.mean, p.inv_std, p.params(), epilogue,
                            sum_dy, sum_dy_xmu);
      CHECK(difference(sum_dy, p.gradients.sum_dy, largest) <= accuracy);
      CHECK(difference(sum_dy_xmu, p.gradients.sum_dy_xmu, largest) <= accuracy);
      host::backward_reduce(test::shuffling_executor{2}, dy.input(), x.view(), p.mean, p.inv_std, p.params(), epilogue,
                            again, xmu_again);
      CHECK(again == sum_dy);
      CHECK(xmu_again == sum_dy_xmu);

      for (auto const how : {host::stores::cached, host::stores::streaming}) {
        test::tensor<T> dx{order, p.n, p.c, p.s, 1}, dresidual{order, p.n, p.c, p.s, 2};
        auto const run = [&](tensor_view<T> const& to, tensor_view<T> const& to_residual,
                             tensor_view<test::read<T>> const& from) {
          host::backward_elemt(host::serial_executor{}, from, x.view(), to, to_residual, p.mean, p.inv_std, p.params(),
                               p.sum_dy, p.sum_dy_xmu, p.oracle.count, epilogue, how);
        };
        auto const check = [&](test::tensor<T>& got, std::vector<long double> const& expected) {
          CHECK(difference(got.values(), expected, scale) <= test::accuracy<T>);
          CHECK(got.intact());
        };
        run(dx.view(), dresidual.view(), dy.view());
        check(dx, p.gradients.dx);
        if (!p.chosen.residual) continue;
        check(dresidual, p.gradients.dresidual);
        // Each output where an input is, and each without the other.
        test::tensor<T> over = dy, alone{order, p.n, p.c, p.s}, other{order, p.n, p.c, p.s};
        run(alone.view(), over.view(), over.view());
        check(alone, p.gradients.dx);
        check(over, p.gradients.dresidual);
        run({}, other.view(), dy.view());
        check(other, p.gradients.dresidual);
        test::tensor<T> dx_over = dy;
        run(dx_over.view(), {}, dx_over.view());
        check(dx_over, p.gradients.dx);
      }
    }
  });
}

TEST_CASE("ReLU of what is not finite") {
  std::vector<float> const values{-INFINITY, INFINITY, NAN, -0.5F};
  std::vector<double> const mean{0}, inv_std{1};
  for (std::int64_t const repeat : {1, 9}) {
    std::vector<float> all;
    for (std::int64_t i = 0; i < repeat; ++i) all.insert(all.end(), values.begin(), values.end());
    std::vector<float> y(all.size(), -1);
    host::normalize(host::serial_executor{}, nchw<float const>(all.data(), 1, 1, std::ssize(all)),
                    nchw(y.data(), 1, 1, std::ssize(all)), mean, inv_std, affine_parameters<float>{},
                    batch_norm_epilogue<float>{activation::relu()});
    for (std::size_t i = 0; i < y.size(); i += 4) {
      CHECK(y[i] == 0);
      CHECK(y[i + 1] == INFINITY);
      CHECK(std::isnan(y[i + 2]));
      CHECK(y[i + 3] == 0);
    }
  }
}

TEST_CASE("of gradients that are not needed none is written, and the sums are the same") {
  constexpr std::int64_t n = 2, c = 6;
  for (std::int64_t const s : {4, 40, 70'000}) {
    epilogue_problem<float> const p{{n, c, s}, {0, false, counted::all, false}};
    test::tensor<float> x{test::arrangement::nchw, n, c, s, p.x}, dy{test::arrangement::nchw, n, c, s, p.dy};
    std::vector<double> sum_dy(c), sum_dy_xmu(c), in_blocks(c), in_blocks_xmu(c);
    host::serial_executor const serial;
    host::backward_reduce(serial, dy.input(), x.view(), p.mean, p.inv_std, p.params(), p.epilogue({}), sum_dy,
                          sum_dy_xmu);
    host::backward_elemt(serial, dy.input(), x.view(), {}, {}, p.mean, p.inv_std, p.params(), sum_dy, sum_dy_xmu,
                         p.oracle.count, p.epilogue({}));
    host::backward_in_blocks(serial, dy.input(), x.view(), {}, {}, p.mean, p.inv_std, p.params(), in_blocks,
                             in_blocks_xmu, p.oracle.count, p.epilogue({}));
    CHECK(in_blocks == sum_dy);
    CHECK(in_blocks_xmu == sum_dy_xmu);
  }
}

TEST_CASE("where ReLU is off, nothing of what comes back is left") {
  constexpr std::int64_t n = 3, c = 20;
  for (std::int64_t const s : {4, 40, 300}) {
    epilogue_problem<float> const p{{n, c, s}, {0, false, counted::all, false}};
    auto off = p.dy, spoiled = p.dy;
    for (std::size_t i = 0; i < off.size(); ++i)
      if (p.oracle.y[i] <= 0 && off[i] != 0) off[i] = 0, spoiled[i] = i % 2 == 0 ? NAN : INFINITY;
    for (auto const order : test::arrangements) {
      auto const backward = [&](std::vector<float> const& gradient) {
        test::tensor<float> x{order, n, c, s, p.x}, dy{order, n, c, s, gradient}, dx{order, n, c, s};
        std::vector<double> sum_dy(c), sum_dy_xmu(c);
        host::backward_reduce(host::serial_executor{}, dy.input(), x.view(), p.mean, p.inv_std, p.params(),
                              p.epilogue({}), sum_dy, sum_dy_xmu);
        host::backward_elemt(host::serial_executor{}, dy.input(), x.view(), dx.view(), {}, p.mean, p.inv_std,
                             p.params(), sum_dy, sum_dy_xmu, p.oracle.count, p.epilogue({}));
        auto all = dx.values();
        all.insert(all.end(), sum_dy.begin(), sum_dy.end());
        all.insert(all.end(), sum_dy_xmu.begin(), sum_dy_xmu.end());
        return all;
      };
      CHECK(backward(spoiled) == backward(off));
    }
  }
}

TEST_CASE_TEMPLATE("an epilogue in blocks gives the bits of whole passes", T, float, bfloat16) {
  int turn = 0;
  constexpr test::extents shared{4, 2, 110'000}; // by two threads, of as much cache as most cores have
  for (auto const& shape : {test::extents{24, 9, 1100}, {500, 600, 1}, {2000, 40, 4}, {24, 24, 196}, shared})
    for (auto const& chose : {choices[0], choices[1], choices[3], choices[4], choices[6], choices[13], choices[12]}) {
      int const which = turn++;
      bool const of_float = sizeof(T) == 4;
      if (shape.s == shared.s && which % 7 != (of_float ? 3 : 2)) continue;
      if (test::sanitized && which != (of_float ? 3 : 10) && (!of_float || which != 5))
        continue; // rows, by ELU, too, and contiguous channels
      epilogue_problem<T> const p{shape, chose};
      for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc}) {
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        CAPTURE(name_of(chose));
        test::tensor<T> x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy};
        test::tensor<T> residual{order, p.n, p.c, p.s, p.chosen.residual ? p.residual : p.x};
        auto const epilogue = p.epilogue(residual.view());
        test::tensor<T> y{order, p.n, p.c, p.s}, y_got = y, dx = y, dx_got = y, dr = y, dr_got = y;
        std::vector<double> mean(p.mean.size()), m2(mean), inv_std(mean), mean_got(mean), m2_got(mean), inv_got(mean);
        std::vector<double> sum(mean), xmu(mean), sum_got(mean), xmu_got(mean);
        auto const finish = [&](std::vector<double> const& from, std::vector<double>& to) {
          return [&](std::int64_t first, std::int64_t length) {
            for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(first + length); ++i)
              to[i] = 1 / std::sqrt(from[i] / static_cast<double>(p.oracle.count) + 1e-3);
          };
        };
        host::serial_executor const serial;
        auto const mask = epilogue.mask ? epilogue.mask : mask_view{};
        if (mask)
          host::local_moments(serial, x.input(), mask, mean, m2);
        else
          host::local_moments(serial, x.input(), mean, m2);
        finish(m2, inv_std)(0, p.c);
        host::normalize(serial, x.view(), y.view(), mean, inv_std, p.params(), epilogue);
        host::backward_reduce(serial, dy.input(), x.view(), mean, inv_std, p.params(), epilogue, sum, xmu);
        for (auto const how : {host::stores::cached, host::stores::streaming}) {
          // On one thread a block of rows is summed while the one before is mapped.
          test::shuffling_executor const exec{how == host::stores::cached ? 1 : 2};
          host::forward_in_blocks(exec, x.view(), y_got.view(), mean_got, m2_got, inv_got, p.params(),
                                  finish(m2_got, inv_got), epilogue, how);
          CHECK(mean_got == mean);
          CHECK(m2_got == m2);
          CHECK(y_got.values() == y.values());
          CHECK(y_got.intact());
          for (std::int64_t const count : {p.oracle.count, std::int64_t{0}}) { // 0: by constant statistics
            host::backward_elemt(serial, dy.input(), x.view(), dx.view(), dr.view(), mean, inv_std, p.params(), sum,
                                 xmu, count, epilogue);
            test::tensor<T> over_x = x, over_dy = dy;
            auto const check = [&](test::tensor<T>& of_dy, test::tensor<T>& of_x, test::tensor<T>& to) {
              host::backward_in_blocks(exec, of_dy.input(), of_x.view(), to.view(), dr_got.view(), mean, inv_std,
                                       p.params(), sum_got, xmu_got, count, epilogue, how);
              CHECK(sum_got == sum);
              CHECK(xmu_got == xmu);
              CHECK(to.values() == dx.values());
              CHECK(dr_got.values() == dr.values());
              CHECK(to.intact());
            };
            check(dy, x, dx_got);
            check(dy, over_x, over_x);
            check(over_dy, x, over_dy);
          }
        }
      }
    }
}
