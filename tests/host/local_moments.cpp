#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>

#include <host/tensors.hpp>
#include <support/oracle.hpp>
#include <support/worse_of.hpp>

using namespace syncnorm;

namespace {

struct statistics {
  std::vector<double> mean, m2;

  template <class E, class X>
  statistics(E const& exec, tensor_view<X> const& x) : mean(static_cast<std::size_t>(x.channels), -1), m2(mean) {
    tensor_view<test::read<X>> const input = x;
    host::local_moments(exec, input, mean, m2);
  }
  friend bool operator==(statistics const&, statistics const&) = default;
};

/// m2 of the oracle.
std::vector<long double> m2_of(test::batch_norm_oracle const& oracle) {
  std::vector<long double> m2 = oracle.var;
  for (auto& value : m2) value *= static_cast<long double>(oracle.samples * oracle.spatial);
  return m2;
}

double variance_error(statistics const& got, test::batch_norm_oracle const& oracle) {
  double worst = 0;
  auto const m2 = m2_of(oracle);
  for (std::size_t c = 0; c < m2.size(); ++c)
    worst = test::worse_of(worst, static_cast<double>(std::abs(got.m2[c] - m2[c]) / m2[c]));
  return worst;
}

} // namespace

TEST_CASE_TEMPLATE("the moments of every shape and arrangement are the oracle's", T, float,
                   bfloat16 AND_UNSANITIZED(double, float16, test::brief)) {
  double const accuracy = sizeof(T) == 8 ? 1e-12 : 1e-5;
  for (auto const& shape : test::shapes) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    auto const values = test::deviates<T>(n, c, s, 7);
    test::batch_norm_oracle const oracle{values, n, c, s, 0};
    for (auto const order : test::arrangements) {
      CAPTURE(test::name_of(shape));
      CAPTURE(test::name_of(order));
      for (std::int64_t const offset : {0, 1}) {
        test::tensor<T> x{order, n, c, s, values, offset};
        tensor_view<T const> const readable = x.view();
        statistics const got{host::serial_executor{}, readable};
        CHECK(test::error_of(got.mean, oracle.mean) <= accuracy);
        CHECK(test::error_of(got.m2, m2_of(oracle)) <= accuracy);
      }
    }
  }
}

TEST_CASE_TEMPLATE("moments do not depend on the executor", T, float, double) {
  for (auto const& shape : test::shapes) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    auto const values = test::deviates<T>(n, c, s, 3);
    for (auto const order : test::arrangements) {
      CAPTURE(test::name_of(shape));
      CAPTURE(test::name_of(order));
      test::tensor<T> x{order, n, c, s, values};
      statistics const serial{host::serial_executor{}, x.view()};
      for (int const threads : {2, 3, 64}) {
        CAPTURE(threads);
        // Many would-be threads change how work is cut; a few suffice to run it.
        struct : test::shuffling_executor {
          int claimed;
          [[nodiscard]] int concurrency() const { return claimed; }
        } exec{{2, static_cast<unsigned>(threads)}, threads};
        CHECK(statistics{exec, x.view()} == serial);
      }
    }
  }
}

TEST_CASE("a stride along which there is nothing else may be anything") {
  constexpr std::int64_t nowhere = std::numeric_limits<std::int64_t>::max() / 2;
  std::vector<float> x{1, 9, 2, 9, 3}, y(5, 9);
  tensor_view<float> const every_other{x.data(), 1, 3, 1, nowhere, 2, nowhere};
  statistics const of{host::serial_executor{}, every_other};
  CHECK(of.mean == std::vector<double>{1, 2, 3});
  CHECK(of.m2 == std::vector<double>(3));
  std::vector<double> const inv_std(3, 2);
  host::normalize<float>(host::serial_executor{}, every_other, {y.data(), 1, 3, 1, nowhere, 2, nowhere}, of.m2, inv_std,
                         affine_parameters<float>{});
  CHECK(y == std::vector<float>{2, 9, 4, 9, 6});
}

TEST_CASE("a part of the channels has the moments of these channels") {
  auto const values = test::deviates<float>(6, 45, 50, 3);
  for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc, test::arrangement::every_other}) {
    test::tensor<float> x{order, 6, 45, 50, values};
    statistics const all{host::serial_executor{}, x.view()};
    statistics const part{host::serial_executor{}, x.view().channel_range(16, 16)};
    for (std::size_t c = 0; c < 16; ++c) {
      CHECK(part.mean[c] == doctest::Approx(all.mean[16 + c]).epsilon(1e-6));
      CHECK(part.m2[c] == doctest::Approx(all.m2[16 + c]).epsilon(1e-6));
    }
  }
}

TEST_CASE_TEMPLATE("where channels are contiguous, a part of them has the bits of all", T, float, double, bfloat16) {
  for (auto const& shape :
       {test::extents{9, 3, 100}, {6, 7, 50}, {400, 20, 1}, {5, 45, 21}, {3, 64, 150}, {2, 300, 9}}) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    CAPTURE(test::name_of(shape));
    auto const values = test::deviates<T>(n, c, s, 5);
    test::tensor<T> x{test::arrangement::nhwc, n, c, s, values};
    statistics const all{host::serial_executor{}, x.view()};
    for (std::int64_t const length : {std::int64_t{1}, std::int64_t{2}, c / 2, c - 1}) {
      for (std::int64_t const first : {std::int64_t{0}, c - length}) {
        CAPTURE(first);
        CAPTURE(length);
        statistics const part{host::serial_executor{}, x.view().channel_range(first, length)};
        auto const of_all = [&](std::vector<double> const& each) {
          return std::vector<double>(each.begin() + first, each.begin() + first + length);
        };
        CHECK(part.mean == of_all(all.mean));
        CHECK(part.m2 == of_all(all.m2));
      }
    }
  }
}

TEST_CASE("without elements the moments are zero") {
  for (auto const order : test::arrangements) {
    for (auto const& shape : {test::extents{0, 5, 4}, {3, 5, 0}, {0, 0, 0}, {4, 0, 9}}) {
      std::int64_t const n = shape.n, c = shape.c, s = shape.s;
      test::tensor<float> x{order, n, c, s};
      for (int const threads : {1, 2}) {
        statistics const got{test::shuffling_executor{threads}, x.view()};
        CHECK(got.mean == std::vector<double>(static_cast<std::size_t>(c), 0.0));
        CHECK(got.m2 == got.mean);
      }
    }
  }
}

TEST_CASE("a constant channel has no spread") {
  std::vector<float> const values(3 * 4 * 1500, 0.1f);
  for (auto const order : test::arrangements) {
    test::tensor<float> x{order, 3, 4, 1500, values};
    statistics const got{host::serial_executor{}, x.view()};
    for (std::size_t c = 0; c < 4; ++c) {
      CHECK(got.mean[c] == doctest::Approx(static_cast<double>(0.1f)).epsilon(1e-12));
      CHECK(got.m2[c] < 1e-20);
    }
  }
}

TEST_CASE_TEMPLATE("equal elements have exactly their mean, and no spread", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  for (std::int64_t n = 1; n <= 40; ++n)
    for (std::int64_t const s : {1, 2, 4, 13, 260})
      for (double const number : {0.1, 0.7, 100.3, 1.0 / 3, 1e-3, 12345.678})
        for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc}) {
          std::int64_t const c = n % 2 == 0 ? 1 : 17;
          if (test::sanitized && (n * s) % 7 != 0) continue;
          CAPTURE(n);
          CAPTURE(s);
          CAPTURE(number);
          CAPTURE(test::name_of(order));
          auto const value = static_cast<T>(static_cast<accumulate_t<T>>(number));
          test::tensor<T> x{order, n, c, s, std::vector<T>(static_cast<std::size_t>(n * c * s), value)};
          statistics const got{host::serial_executor{}, x.view()};
          CHECK(got.mean == std::vector<double>(static_cast<std::size_t>(c), as_double(value)));
          CHECK(got.m2 == std::vector<double>(static_cast<std::size_t>(c), 0.0));
        }
}

TEST_CASE("a large mean beside a small deviation does not cancel") {
  struct large_mean {
    double mean, deviation;
  };
  for (auto const& shape : {test::extents{32, 3, 784}, {5, 2, 3136}, {200, 20, 49}, {4096, 33, 1}, {900, 5, 4}}) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    for (auto const& given : {large_mean{1e4, 1}, {1e3, 1e-2}, {-3e5, 1}}) {
      CAPTURE(test::name_of(shape));
      CAPTURE(given.mean);
      auto const values = test::deviates<float>(n, c, s, 5, given.mean, given.deviation);
      test::batch_norm_oracle const oracle{values, n, c, s, 0};

      // The form that cancels must fail here, or the data would prove nothing.
      std::vector<float> sum(oracle.mean.size()), square(sum);
      for (std::size_t i = 0; i < values.size(); ++i) {
        auto const channel = i / static_cast<std::size_t>(s) % sum.size();
        sum[channel] += values[i];
        square[channel] += values[i] * values[i];
      }
      auto const count = static_cast<float>(n * s);
      for (std::size_t channel = 0; channel < sum.size(); ++channel) {
        float const naive = square[channel] / count - (sum[channel] / count) * (sum[channel] / count);
        CHECK(std::abs(static_cast<long double>(naive) - oracle.var[channel]) > 1e-3L * oracle.var[channel]);
      }

      for (auto const order : test::arrangements) {
        CAPTURE(test::name_of(order));
        test::tensor<float> x{order, n, c, s, values};
        statistics const got{host::serial_executor{}, x.view()};
        CHECK(variance_error(got, oracle) < 1e-6);
        for (std::size_t channel = 0; channel < oracle.mean.size(); ++channel)
          CHECK(std::abs(got.mean[channel] - oracle.mean[channel]) <= 1e-6L * std::sqrt(oracle.var[channel]));
      }
    }
  }
}

TEST_CASE_TEMPLATE("a first sample, position or element far from the rest costs no accuracy", T, float, bfloat16) {
  enum class far { sample, quarter, vector, some, element };
  for (auto const& shape :
       {test::extents{40, 3, 784}, {3, 2, 5000}, {90, 20, 49}, {3000, 17, 1}, {500, 5, 4}, {64, 4, 196}}) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    if (test::sanitized && n * c * s > 60'000) continue;
    for (float const distance : {100.F, 1e5F}) {
      if (test::sanitized && distance == 100) continue;
      for (auto const kind : {far::sample, far::quarter, far::vector, far::some, far::element}) {
        CAPTURE(test::name_of(shape));
        CAPTURE(static_cast<int>(kind));
        CAPTURE(distance);
        std::int64_t const positions = kind == far::sample    ? s
                                       : kind == far::quarter ? s / 4 + 1
                                       : kind == far::vector  ? 16
                                       : kind == far::some    ? 4
                                                              : 1;
        auto values = test::deviates<T>(n, c, s, 11);
        for (std::size_t i = 0; i < values.size(); ++i) {
          auto const index = static_cast<std::int64_t>(i);
          bool const first = index / (c * s) * s + index % s < positions; // those of several samples where one is short
          if (first) values[i] = static_cast<T>(static_cast<float>(values[i]) + distance);
        }
        test::batch_norm_oracle const oracle{values, n, c, s, 0};
        for (auto const order : test::arrangements) {
          CAPTURE(test::name_of(order));
          test::tensor<T> x{order, n, c, s, values};
          statistics const got{host::serial_executor{}, x.view()};
          CHECK(variance_error(got, oracle) <= 1e-5);
          CHECK(test::error_of(got.mean, oracle.mean) <= 1e-5);
        }
      }
    }
  }
}

TEST_CASE("elements of two values, which all round the same way, keep the accuracy of the variance") {
  constexpr std::int64_t positions = 2048, c = 32;
  struct values {
    float first, often, seldom;
    std::int64_t firsts, every; // of the latter, so many first, and then every so many a `seldom`
  };
  // Where sums are about the first, these lose much of the variance; found by search.
  std::array<values, 4> const kinds{{{1.97111738F, 2.77657366F, 2.85595179F, 8, 5},
                                     {1.98758054F, 2.78840542F, 2.86194873F, 8, 7},
                                     {1.10662746F, 1.35578728F, 2.06891942F, 39, 16},
                                     {0.882542849F, 1.11419559F, 1.66361153F, 16, 11}}};
  std::vector<float> x;
  for (std::size_t channel = 0; channel < c; ++channel) {
    auto const [first, often, seldom, firsts, every] = kinds[channel % kinds.size()];
    for (std::int64_t s = 0; s < positions; ++s) x.push_back(s < firsts ? first : s % every == 0 ? seldom : often);
  }
  test::batch_norm_oracle const oracle{x, 1, c, positions, 0};
  for (auto const order : test::arrangements) {
    CAPTURE(test::name_of(order));
    test::tensor<float> in{order, 1, c, positions, x};
    CHECK(variance_error({host::serial_executor{}, in.view()}, oracle) <= 20.0 / 3 * 0x1p-20);
  }
}

TEST_CASE("squares that a float holds make a variance, however many there are") {
  constexpr float far = 4.9e17F; // of what is documented
  for (auto const order : test::arrangements)
    for (std::array<std::int64_t, 2> const of :
         {std::array<std::int64_t, 2>{512, 255}, {256, 196}, {64, 49}, {2, 9000}, {400, 3}}) {
      std::int64_t const n = of[0], s = of[1];
      INFO(test::name_of(order), ", N ", n, ", S ", s);
      std::vector<float> values(static_cast<std::size_t>(2 * n * s));
      // The first sample is as far from the others as may be.
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<std::int64_t>(i) / (2 * s) % 2 == 0 ? far : -far;
      test::tensor<float> x{order, n, 2, s, values};
      for (double const m2 : statistics{host::serial_executor{}, x.view()}.m2)
        CHECK(std::abs(m2 / (static_cast<double>(n * s) * far * far) - 1) < 1e-5);
    }
}

TEST_CASE("what is no number stays in its channel") {
  for (auto const order : test::arrangements) {
    for (std::int64_t const s : {1, 5, 300}) {
      auto values = test::deviates<float>(4, 20, s, 2);
      values[static_cast<std::size_t>(3 * s)] = std::numeric_limits<float>::quiet_NaN();
      test::tensor<float> x{order, 4, 20, s, values};
      statistics const got{host::serial_executor{}, x.view()};
      for (std::size_t c = 0; c < 20; ++c) {
        CHECK(std::isnan(got.mean[c]) == (c == 3));
        CHECK(std::isnan(got.m2[c]) == (c == 3));
      }
    }
  }
}
