#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/epilogue_in_blocks.hpp>
#include <syncnorm/host/masked_moments.hpp>

#include <host/tensors.hpp>
#include <support/epilogue_oracle.hpp>

using namespace syncnorm;

namespace {

enum class counted { all, none, padded, most, few };

/// A mask `[N, S]`, of which `all` says that there is none.
std::vector<std::uint8_t> make_mask(counted kind, std::int64_t n, std::int64_t s) {
  std::vector<std::uint8_t> mask;
  std::mt19937 random{7};
  for (std::int64_t i = 0; kind != counted::all && i < n; ++i)
    for (std::int64_t j = 0; j < s; ++j) {
      bool const counts = kind == counted::padded ? j < s - (i * 5) % (s + 1)
                          : kind == counted::most ? random() % 8 != 0
                          : kind == counted::few  ? random() % 8 == 0
                                                  : false;
      mask.push_back(static_cast<std::uint8_t>(counts ? 1 + random() % 255 : 0)); // any byte but 0
    }
  return mask;
}

struct choice {
  double slope;
  bool residual;
  counted mask;
  bool zeroes, exponential = false;
};

/// Between them: all that an epilogue can be asked for, each with the others.
constexpr choice choices[] = {
    {0, false, counted::all, false},      {0.125, true, counted::all, false},
    {-0.5, false, counted::padded, true}, {1, true, counted::most, true},
    {0, true, counted::padded, false},    {1, false, counted::padded, false},
    {1, false, counted::padded, true},    {1, false, counted::few, true},
    {2, false, counted::few, false},      {0.125, true, counted::none, false},
    {0, true, counted::none, true},       {1, true, counted::all, false},
    {1, true, counted::all, false, true}, {0.75, false, counted::most, true, true},
};

std::string name_of(choice const& c) {
  return (c.exponential ? "ELU " : "slope ") + std::to_string(c.slope) + (c.residual ? ", residual" : "") + ", mask " +
         std::to_string(static_cast<int>(c.mask)) + (c.zeroes ? ", zeroes" : "");
}

template <class T>
std::vector<long double> wide(std::vector<T> const& values) {
  std::vector<long double> all;
  for (auto const& value : values) all.push_back(static_cast<long double>(static_cast<accumulate_t<T>>(value)));
  return all;
}

template <class T>
struct epilogue_problem {
  using A = accumulate_t<T>;
  std::int64_t n, c, s;
  choice chosen;
  std::vector<T> x, dy, residual;
  std::vector<A> gamma, beta;
  std::vector<std::uint8_t> mask;
  test::epilogue_oracle oracle;
  test::epilogue_oracle::gradients gradients;
  std::vector<double> mean, inv_std, sum_dy, sum_dy_xmu;

  epilogue_problem(test::extents const& e, choice const& chose)
      : n{e.n}, c{e.c}, s{e.s}, chosen{chose}, mask{make_mask(chose.mask, n, s)} {
    for (std::int64_t i = 0; i < c; ++i) {
      auto const channel = static_cast<double>(i % 50);
      gamma.push_back(static_cast<A>(channel < 25 ? 0.75 + channel / 100 : -0.5));
      beta.push_back(static_cast<A>(0.25 - channel / 50));
    }
    x = test::deviates<T>(n, c, s, 1);
    dy = test::deviates<T>(n, c, s, 2, 0.1);
    if (chose.residual) residual = test::deviates<T>(n, c, s, 3, 0.2);
    oracle = {n, c, s, wide(x), wide(gamma), wide(beta), wide(residual), mask, chose.zeroes, chose.slope};
    oracle.exponential = chose.exponential;
    oracle.forward();
    // Which side of the kink of an activation a value very near to it is on, rounding may tell: no gradient goes there.
    oracle.for_each_near_kink(1e-5L, [&](std::size_t i) { dy[i] = static_cast<T>(A{0}); });
    gradients = oracle.backward(wide(dy), 0, n);
    for (std::size_t i = 0; i < oracle.mean.size(); ++i) {
      mean.push_back(static_cast<double>(oracle.mean[i]));
      inv_std.push_back(static_cast<double>(oracle.inv_std[i]));
      sum_dy.push_back(static_cast<double>(gradients.sum_dy[i]));
      sum_dy_xmu.push_back(static_cast<double>(gradients.sum_dy_xmu[i]));
    }
  }

  /// With the mask's rows every `step` bytes apart.
  [[nodiscard]] batch_norm_epilogue<T> epilogue(tensor_view<T const> const& of_residual) const {
    return {{chosen.slope, chosen.exponential},
            chosen.residual ? of_residual : tensor_view<T const>{},
            mask.empty() ? mask_view{} : mask_of(mask.data(), n, s),
            chosen.zeroes ? masked_outputs::zero : masked_outputs::normalized};
  }
  [[nodiscard]] affine_parameters<A> params() const { return {gamma, beta}; }
  /// The greatest number that a gradient is made of.
  [[nodiscard]] long double gradient_scale() const {
    long double scale = 1e-3L;
    for (auto const value : gradients.dx) scale = std::max(scale, std::abs(value));
    for (auto const value : gradients.dresidual) scale = std::max(scale, std::abs(value));
    return scale;
  }
};

/// Greatest difference relative to `scale`; infinite where a value is no number.
template <class T>
double difference(std::vector<T> const& got, std::vector<long double> const& expected, long double scale) {
  long double worst = got.size() == expected.size() ? 0 : std::numeric_limits<long double>::infinity();
  auto const values = wide(got);
  for (std::size_t i = 0; i < got.size(); ++i) {
    auto const off = std::abs(values[i] - expected[i]);
    worst = std::isnan(off) ? std::numeric_limits<long double>::infinity() : std::max(worst, off);
  }
  return static_cast<double>(worst / scale);
}

/// Of the shapes those that differ in kernels; the choices take turns over all of them.
template <class T, class F>
void for_each_problem(F const& f) {
  std::size_t turn = 0;
  for (auto const& shape : test::shapes) {
    for (int k = 0; k < (test::sanitized ? 1 : 3); ++k) {
      auto const& chose = choices[5 * turn++ % std::size(choices)];
      CAPTURE(test::name_of(shape));
      CAPTURE(name_of(chose));
      f(epilogue_problem<T>{shape, chose});
    }
  }
}

} // namespace

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
