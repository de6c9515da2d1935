#include <cmath>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>

#include <host/tensors.hpp>
#include <support/oracle.hpp>
#include <support/worse_of.hpp>

using namespace syncnorm;

namespace {

std::vector<double> rounded(std::vector<long double> const& values) { return {values.begin(), values.end()}; }

/// A batch with the oracle's statistics, sums and gradients of it.
template <class T>
struct gradient_problem {
  using A = accumulate_t<T>;
  std::int64_t n, c, s;
  std::vector<T> x, dy;
  std::vector<A> gamma;
  test::batch_norm_oracle oracle;
  test::batch_norm_oracle::gradients gradients;
  std::vector<double> mean, inv_std, sum_dy, sum_dy_xmu;

  explicit gradient_problem(test::extents const& e, double offset = 0.5)
      : n{e.n}, c{e.c}, s{e.s}, x{test::deviates<T>(n, c, s, 1, offset)}, dy{test::deviates<T>(n, c, s, 2, 0.1)},
        gamma(static_cast<std::size_t>(c), A(0.75)), oracle{x, n, c, s, 1e-3}, gradients{oracle.backward(x, dy, gamma)},
        mean{rounded(oracle.mean)}, inv_std{rounded(oracle.inv_std)}, sum_dy{rounded(gradients.beta)} {
    for (std::size_t i = 0; i < mean.size(); ++i) // about the mean as a double holds it
      sum_dy_xmu.push_back(
          static_cast<double>(gradients.gamma[i] / oracle.inv_std[i] + (oracle.mean[i] - mean[i]) * gradients.beta[i]));
  }
};

struct sums {
  std::vector<double> dy, dy_xmu;

  template <class E, class T>
  sums(E const& exec, tensor_view<T> dy_view, std::type_identity_t<tensor_view<T const>> x,
       std::vector<double> const& mean)
      : dy(mean.size(), -1), dy_xmu(mean.size(), -1) {
    tensor_view<test::read<T>> const input = dy_view;
    host::backward_reduce(exec, input, x, mean, dy, dy_xmu);
  }
  friend bool operator==(sums const&, sums const&) = default;
};

/// Error relative to the sum of the magnitudes: the sums themselves are near zero by chance.
template <class T>
double sum_error(gradient_problem<T> const& p, sums const& got) {
  std::vector<long double> dy_scale(p.mean.size()), dy_xmu_scale(dy_scale);
  for (std::size_t i = 0; i < p.x.size(); ++i) {
    auto const channel = i / static_cast<std::size_t>(p.s) % dy_scale.size();
    auto const magnitude = std::abs(static_cast<long double>(p.dy[i]));
    dy_scale[channel] += magnitude;
    dy_xmu_scale[channel] += magnitude * std::abs(static_cast<long double>(p.x[i]) - p.oracle.mean[channel]);
  }
  long double worst = 0;
  auto const add = [&](double value, double expected, long double scale) {
    worst = test::worse_of(worst, std::abs(value - expected) / (scale > 0 ? scale : 1));
  };
  for (std::size_t c = 0; c < dy_scale.size(); ++c) {
    add(got.dy[c], p.sum_dy[c], dy_scale[c]);
    add(got.dy_xmu[c], p.sum_dy_xmu[c], dy_xmu_scale[c]);
  }
  return static_cast<double>(worst);
}

} // namespace

TEST_CASE_TEMPLATE("the sums of every shape and arrangement are the oracle's", T, float,
                   bfloat16 AND_UNSANITIZED(double, float16, test::brief)) {
  double const accuracy = sizeof(T) == 8 ? 1e-12 : 1e-5;
  for (auto const& shape : test::shapes) {
    gradient_problem<T> const p{shape};
    for (auto const order : test::arrangements) {
      CAPTURE(test::name_of(shape));
      CAPTURE(test::name_of(order));
      for (std::int64_t const offset : {0, 1}) {
        test::tensor<T> x{order, p.n, p.c, p.s, p.x, offset}, dy{order, p.n, p.c, p.s, p.dy};
        sums const got{host::serial_executor{}, dy.view(), x.view(), p.mean};
        CHECK(sum_error(p, got) <= accuracy);
        if (sizeof(T) != 2) {
          for (int const threads : {2, 64}) {
            struct : test::shuffling_executor {
              int claimed;
              [[nodiscard]] int concurrency() const { return claimed; }
            } exec{{2, static_cast<unsigned>(threads)}, threads};
            CHECK(sums{exec, dy.view(), x.view(), p.mean} == got);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "of equal gradients, which all round the same way, no more are added up than 32, however many rows there are") {
  constexpr std::int64_t n = test::sanitized ? 2000 : 20'000, c = 5;
  constexpr std::array<float, c> of_channel{1.1F, 1.3F, 1.7F, -0.3F, 5.9F};
  for (std::int64_t const s : {16, 49}) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < n * c * s; ++i) values.push_back(of_channel[static_cast<std::size_t>(i / s % c)]);
    for (auto const order : test::arrangements) {
      INFO(test::name_of(order), ", S ", s);
      test::tensor<float> dy{order, n, c, s, values};
      sums const got{host::serial_executor{}, dy.view(), dy.view(), std::vector<double>(c, 0.0)};
      for (std::size_t i = 0; i < of_channel.size(); ++i) {
        double const value = of_channel[i], count = static_cast<double>(n * s);
        CHECK(std::abs(got.dy[i] / (count * value) - 1) <= 2.0 / 3 * 0x1p-20);
        CHECK(std::abs(got.dy_xmu[i] / (count * value * value) - 1) <= 2.0 / 3 * 0x1p-20);
      }
    }
  }
}

TEST_CASE("the sums about a large mean make up for its rounding") {
  gradient_problem<float> const p{{8, 20, 200}, 12345.678};
  for (auto const order : test::arrangements) {
    test::tensor<float> x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy};
    sums const got{host::serial_executor{}, dy.view(), x.view(), p.mean};
    CHECK(sum_error(p, got) <= 1e-5);
  }
}

TEST_CASE_TEMPLATE("dx of every shape and arrangement is the oracle's", T, float,
                   bfloat16 AND_UNSANITIZED(double, float16, test::brief)) {
  double const accuracy = test::accuracy<T>;
  std::size_t cells = 0;
  for (auto const& shape : test::shapes) {
    gradient_problem<T> const p{shape};
    auto const& expected = p.gradients.dx;
    for (auto const order : test::arrangements) {
      for (auto const how : {host::stores::cached, host::stores::streaming}) {
        if (test::sanitized && cells++ % 3 > 0) continue;
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        test::tensor<T> x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy, 3}, dx{order, p.n, p.c, p.s, 1};
        // Where dx nearly cancels, its terms are its scale.
        auto const check = [&](test::tensor<T>& got) {
          auto const values = got.values();
          long double worst = 0, largest = 0;
          for (std::size_t i = 0; i < values.size(); ++i) {
            auto const channel = i / static_cast<std::size_t>(p.s) % static_cast<std::size_t>(p.c);
            long double const term = 0.75L * p.oracle.inv_std[channel] * std::abs(static_cast<long double>(p.dy[i]));
            worst = test::worse_of(worst, std::abs(static_cast<long double>(values[i]) - expected[i]));
            largest = std::max(largest, term);
          }
          CHECK(worst <= accuracy * largest);
          CHECK(got.intact());
        };
        auto const elemt = [&](auto const& exec, tensor_view<T> const& to, tensor_view<T> const& g,
                               tensor_view<T> const& from) {
          host::backward_elemt(exec, g, from, to, p.mean, p.inv_std, std::span{p.gamma}, p.sum_dy, p.sum_dy_xmu,
                               p.n * p.s, how);
        };
        elemt(host::serial_executor{}, dx.view(), dy.view(), x.view());
        check(dx);
        test::tensor<T> again{order, p.n, p.c, p.s, 1}, over_dy = dy, over_x = x;
        elemt(test::shuffling_executor{}, again.view(), dy.view(), x.view());
        CHECK(test::error_of(again.values(), dx.values()) == 0);
        elemt(host::serial_executor{}, over_dy.view(), over_dy.view(), x.view());
        check(over_dy);
        elemt(host::serial_executor{}, over_x.view(), dy.view(), over_x.view());
        check(over_x);
      }
    }
  }
}

TEST_CASE("a count of 0 stands for constant statistics") {
  gradient_problem<float> const p{{3, 9, 21}};
  test::tensor<float> x{test::arrangement::nchw, p.n, p.c, p.s, p.x}, dy{test::arrangement::nchw, p.n, p.c, p.s, p.dy};
  test::tensor<float> dx{test::arrangement::nchw, p.n, p.c, p.s};
  std::span<double const> const none;
  std::vector<long double> expected;
  for (bool const has_gamma : {false, true}) {
    host::backward_elemt(host::serial_executor{}, dy.view(), x.view(), dx.view(), p.mean, p.inv_std,
                         has_gamma ? std::span<float const>{p.gamma} : std::span<float const>{}, none, none, 0);
    expected.clear();
    for (std::size_t i = 0; i < p.dy.size(); ++i)
      expected.push_back(p.dy[i] * p.oracle.inv_std[i / 21 % 9] * (has_gamma ? 0.75L : 1));
    CHECK(test::error_of(dx.values(), expected) <= 1e-6);
  }
}

TEST_CASE("without elements the sums are zero and dx is left") {
  for (auto const order : test::arrangements)
    for (auto const& [n, c, s] : {test::extents{0, 5, 4}, {3, 5, 0}, {4, 0, 9}}) {
      test::tensor<double> x{order, n, c, s}, dx = x;
      std::vector<double> const ones(static_cast<std::size_t>(c), 1.0), zeros(ones.size(), 0.0);
      sums const got{test::shuffling_executor{}, x.view(), x.view(), ones};
      CHECK(got.dy == zeros);
      CHECK(got.dy_xmu == zeros);
      host::backward_elemt(host::serial_executor{}, x.view(), x.view(), dx.view(), ones, ones,
                           std::span<double const>{}, got.dy, got.dy_xmu, 8);
      CHECK(dx.intact());
    }
}
