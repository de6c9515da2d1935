#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/masked_moments.hpp>

#include <host/epilogue_problem.hpp>
#include <host/tensors.hpp>

using namespace syncnorm;
using test::choice;
using test::counted;
using test::difference;
using test::epilogue_problem;
using test::make_mask;
using test::name_of;
using test::wide;

TEST_CASE_TEMPLATE("moments are those of the positions that count", T, float, bfloat16 AND_UNSANITIZED(double)) {
  double const accuracy = sizeof(T) == 8 ? 1e-12 : 1e-5;
  for (auto const& shape : test::shapes)
    for (auto const kind : {counted::none, counted::padded, counted::most, counted::few}) {
      epilogue_problem<T> p{shape, {1, false, kind, true}};
      // Elements that do not count may be anything.
      for (std::size_t i = 0; i < p.x.size(); ++i) {
        auto const at = static_cast<std::int64_t>(i);
        if (p.mask[static_cast<std::size_t>(at / (p.c * p.s) * p.s + at % p.s)] == 0)
          p.x[i] = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
      }
      for (auto const order : test::arrangements) {
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        CAPTURE(static_cast<int>(kind));
        test::tensor<T> x{order, p.n, p.c, p.s, p.x};
        auto const mask = mask_of(p.mask.data(), p.n, p.s);
        std::vector<double> mean(p.mean.size(), -1), m2(mean), mean_again(mean), m2_again(mean);
        CHECK(host::local_moments(host::serial_executor{}, x.input(), mask, mean, m2) == p.oracle.count);
        CHECK(host::prepared_epilogue<T>{p.epilogue({})}.count(x.view()) == p.oracle.count);
        // A mean may be near 0 by chance, as m2 is of a single position.
        CHECK(difference(mean, p.oracle.mean, 1) <= accuracy);
        CHECK(difference(m2, p.oracle.m2, 1 + *std::ranges::max_element(p.oracle.m2)) <= accuracy);
        host::local_moments(test::shuffling_executor{2}, x.input(), mask, mean_again, m2_again);
        CHECK(mean_again == mean);
        CHECK(m2_again == m2);
      }
    }
}

TEST_CASE_TEMPLATE("first elements far from the rest cost moments of those that count no accuracy", T, float,
                   bfloat16) {
  for (auto const& shape : {test::extents{1, 2, 4096}, {40, 3, 784}, {64, 4, 196}, {90, 20, 49}, {700, 17, 1}}) {
    if (test::sanitized && shape.n * shape.c * shape.s > 60'000) continue;
    for (std::int64_t const far : {1, 4, 16}) {
      epilogue_problem<T> p{shape, {1, false, counted::most, true}};
      for (std::int64_t i = 0; i < p.n * p.c * p.s; ++i) {
        auto& value = p.x[static_cast<std::size_t>(i)];
        if (i / (p.c * p.s) * p.s + i % p.s >= far) value = static_cast<T>(static_cast<float>(value) + 100);
      }
      p.oracle.x = wide(p.x);
      p.oracle.forward();
      for (auto const order : test::arrangements) {
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        CAPTURE(far);
        test::tensor<T> x{order, p.n, p.c, p.s, p.x};
        std::vector<double> mean(p.mean.size()), m2(mean);
        host::local_moments(host::serial_executor{}, x.input(), mask_of(p.mask.data(), p.n, p.s), mean, m2);
        for (std::size_t c = 0; c < m2.size(); ++c)
          CHECK(static_cast<double>(std::abs(m2[c] / p.oracle.m2[c] - 1)) <= 1e-5);
      }
    }
  }
}

TEST_CASE("a mask of other strides, and one by which all count") {
  constexpr std::int64_t n = 3, s = 20;
  epilogue_problem<float> const p{{n, 5, s}, {1, false, counted::most, false}};
  std::vector<std::uint8_t> transposed(static_cast<std::size_t>(2 * n * s), 9);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < s; ++j)
      transposed[static_cast<std::size_t>(2 * (j * n + i))] = p.mask[static_cast<std::size_t>(i * s + j)];
  test::tensor<float> x{test::arrangement::nchw, n, 5, s, p.x};
  std::vector<double> mean(5), m2(5), of_strided(5), m2_of_strided(5);
  host::local_moments(host::serial_executor{}, x.input(), mask_of(p.mask.data(), n, s), mean, m2);
  host::local_moments(host::serial_executor{}, x.input(), mask_view{transposed.data(), n, s, 2, 2 * n}, of_strided,
                      m2_of_strided);
  CHECK(of_strided == mean);
  CHECK(m2_of_strided == m2);

  // One position, of whose mask every other byte is not its own.
  test::tensor<float> samples{test::arrangement::nhwc, n * s, 5, 1, p.x};
  std::vector<std::uint8_t> apart(static_cast<std::size_t>(2 * n * s), 9);
  for (std::size_t i = 0; i < p.mask.size(); ++i) apart[2 * i] = p.mask[i];
  host::local_moments(host::serial_executor{}, samples.input(), mask_of(p.mask.data(), n * s, 1), mean, m2);
  host::local_moments(host::serial_executor{}, samples.input(), mask_view{apart.data(), n * s, 1, 2, 1}, of_strided,
                      m2_of_strided);
  CHECK(of_strided == mean);
  CHECK(m2_of_strided == m2);

  std::vector<std::uint8_t> const ones(n * s, 1);
  host::local_moments(host::serial_executor{}, x.input(), mask_of(ones.data(), n, s), mean, m2);
  host::local_moments(host::serial_executor{}, x.input(), of_strided, m2_of_strided);
  CHECK(of_strided == mean);
  CHECK(m2_of_strided == m2);
  CHECK(host::local_moments(host::serial_executor{}, x.input(), mask_view{}, of_strided, m2_of_strided) == n * s);
  CHECK(of_strided == mean);
  CHECK(m2_of_strided == m2);
}

TEST_CASE_TEMPLATE("of contiguous channels and short rows, what does not count changes nothing of what does", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  constexpr choice all{0.125, false, counted::all, false};
  struct arranged {
    test::arrangement order;
    test::extents of;
  };
  std::vector<arranged> cases;
  for (std::int64_t const channels : {1, 3, 24, 33, 64, 100, 728, 1025})
    for (std::int64_t const s : {40, 1})
      if (!test::sanitized || channels % 2 == (s == 1 ? 0 : 1))
        cases.push_back({test::arrangement::nhwc, {120 / s, channels, s}});
  for (std::int64_t const channels : {2700, 5120})
    if (!test::sanitized) cases.push_back({test::arrangement::nhwc, {2, channels, 5}});
  for (auto const& e : {test::extents{6, 3, 17}, {3, 40, 40}, {5, 300, 40}, {4, 1025, 20}, {4, 7, 100}, {20, 50, 127}})
    if (!test::sanitized || e.n * e.c * e.s < 20000) cases.push_back({test::arrangement::nchw, e});
  for (auto const& shape : cases) {
    auto const order = shape.order;
    std::int64_t const n = shape.of.n, channels = shape.of.c, s = shape.of.s;
    CAPTURE(test::name_of(order));
    CAPTURE(test::name_of(shape.of));
    epilogue_problem<T> const whole{shape.of, all};
    test::tensor<T> const x{order, n, channels, s, whole.x}, dy{order, n, channels, s, whole.dy};
    auto const run = [&](epilogue_problem<T> const& p, std::int64_t offset) {
      test::tensor<T> from = x, y{order, n, channels, s, offset}, dx{order, n, channels, s, offset}, over_dy = dy;
      auto const epilogue = p.epilogue({});
      host::normalize(test::shuffling_executor{2}, from.view(), y.view(), p.mean, p.inv_std, p.params(), epilogue,
                      host::stores::streaming);
      auto const backward = [&](test::tensor<T>& of_dy, test::tensor<T>& to) {
        host::backward_elemt(host::serial_executor{}, of_dy.input(), from.view(), to.view(), {}, whole.mean,
                             whole.inv_std, whole.params(), whole.sum_dy, whole.sum_dy_xmu, whole.oracle.count,
                             epilogue, host::stores::streaming);
      };
      backward(over_dy, dx);
      backward(over_dy, over_dy);
      CHECK(y.intact());
      CHECK(dx.intact());
      CHECK(over_dy.values() == dx.values());
      return std::pair{y.values(), dx.values()};
    };
    auto const whole_outputs = run(whole, 0);
    for (auto const kind : {counted::padded, counted::most})
      for (std::int64_t const offset : {0, 1, 8}) {
        epilogue_problem<T> p = whole;
        p.mask = make_mask(kind, n, s);
        p.chosen.zeroes = true;
        auto expected = whole_outputs;
        for (std::size_t i = 0; i < whole.x.size(); ++i) {
          auto const at = static_cast<std::int64_t>(i), row = at / (channels * s) * s;
          if (p.mask[static_cast<std::size_t>(row + at % s)] == 0) expected.first[i] = expected.second[i] = T(0.0F);
        }
        CHECK(run(p, offset) == expected);
      }
  }
}

TEST_CASE_TEMPLATE("masked positions farther from each other than samples are taken for these", T, float, bfloat16) {
  double const accuracy = 1e-5;
  for (auto const& shape : {test::extents{7, 24, 50}, {24, 100, 60}, {3, 1100, 9}})
    for (auto const& chose : {choice{0, true, counted::padded, true}, choice{1, false, counted::most, false}}) {
      CAPTURE(test::name_of(shape));
      CAPTURE(name_of(chose));
      epilogue_problem<T> const p{shape, chose};
      auto const run = [&](test::arrangement order, bool transposes) {
        test::tensor<T> const x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy},
            residual{order, p.n, p.c, p.s, p.chosen.residual ? p.residual : p.x};
        test::tensor<T> from = x, of_dy = dy, also = residual, y{order, p.n, p.c, p.s}, dx = y, dr = y, in_blocks = y;
        host::prepared_epilogue<T> const epilogue{p.epilogue(also.view()), from.view()};
        CHECK(epilogue.is_transposed() == transposes);
        std::vector<double> mean(p.mean.size()), m2(mean), sum(mean), xmu(mean), mean_got(mean), m2_got(mean);
        host::serial_executor const exec;
        host::local_moments(exec, from.input(), epilogue, mean, m2);
        CHECK(difference(mean, p.oracle.mean, 1) <= accuracy);
        CHECK(difference(m2, p.oracle.m2, 1 + *std::ranges::max_element(p.oracle.m2)) <= accuracy);
        host::backward_reduce(exec, of_dy.input(), from.view(), p.mean, p.inv_std, p.params(), epilogue, sum, xmu);
        long double const scale = static_cast<long double>(p.oracle.count) * p.gradient_scale();
        CHECK(difference(sum, p.gradients.sum_dy, scale) <= accuracy);
        CHECK(difference(xmu, p.gradients.sum_dy_xmu, scale) <= accuracy);
        host::normalize(exec, from.view(), y.view(), p.mean, p.inv_std, p.params(), epilogue);
        host::backward_elemt(exec, of_dy.input(), from.view(), dx.view(), dr.view(), p.mean, p.inv_std, p.params(),
                             p.sum_dy, p.sum_dy_xmu, p.oracle.count, epilogue);
        auto const inv_std = p.inv_std;
        host::forward_in_blocks(
            exec, from.view(), in_blocks.view(), mean_got, m2_got, inv_std, p.params(), [&](auto, auto) {}, epilogue);
        CHECK(mean_got == mean);
        CHECK(m2_got == m2);
        return std::tuple{y.values(), dx.values(), chose.residual ? dr.values() : std::vector<T>{}};
      };
      CHECK(run(test::arrangement::tbc, true) == run(test::arrangement::nhwc, false));
    }
}

TEST_CASE("garbage in positions that do not count stays there") {
  constexpr std::int64_t n = 3, c = 20, s = 40;
  epilogue_problem<float> const p{{n, c, s}, {1, false, counted::most, true}};
  auto spoiled = p.x;
  for (std::size_t i = 0; i < spoiled.size(); ++i)
    if (p.mask[i / (c * s) * s + i % s] == 0) spoiled[i] = i % 2 == 0 ? NAN : INFINITY;
  for (auto const order : test::arrangements) {
    test::tensor<float> x{order, n, c, s, spoiled}, dy{order, n, c, s, p.dy}, dx{order, n, c, s};
    auto const epilogue = p.epilogue({});
    std::vector<double> sum_dy(c), sum_dy_xmu(c);
    host::backward_reduce(host::serial_executor{}, dy.input(), x.view(), p.mean, p.inv_std, p.params(), epilogue,
                          sum_dy, sum_dy_xmu);
    CHECK(difference(sum_dy, p.gradients.sum_dy, 100) <= 1e-5);
    CHECK(difference(sum_dy_xmu, p.gradients.sum_dy_xmu, 100) <= 1e-5);
    host::backward_elemt(host::serial_executor{}, dy.input(), x.view(), dx.view(), {}, p.mean, p.inv_std, p.params(),
                         sum_dy, sum_dy_xmu, p.oracle.count, epilogue);
    CHECK(difference(dx.values(), p.gradients.dx, p.gradient_scale()) <= 1e-5);
    host::normalize(host::serial_executor{}, x.view(), dx.view(), p.mean, p.inv_std, p.params(), epilogue);
    CHECK(difference(dx.values(), p.oracle.y, 4) <= 1e-5);
  }
}
