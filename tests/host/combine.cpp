#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/combine.hpp>
#include <syncnorm/host/combine_gated.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

namespace {

/// Combinations of the terms whose bits `terms` has: 1 of a, 2 of b, 4 of x.
std::vector<combination> make_channels(std::int64_t channels, int terms) {
  std::vector<combination> all;
  for (std::int64_t i = 0; i < channels; ++i) {
    auto const channel = static_cast<double>(i);
    auto const scale = [&](int bit, double value) { return (terms & bit) != 0 ? value : 0.0; };
    all.push_back({scale(1, 1.5 + std::sin(channel)), scale(2, -0.5 + channel / 10), 100.1 + channel,
                   scale(4, 0.75 + std::cos(channel)), channel / 7 - 1});
  }
  return all;
}

} // namespace

TEST_CASE_TEMPLATE("a combination is the sum of its terms, and of no others", T, float,
                   float16 AND_UNSANITIZED(double)) {
  constexpr std::int64_t n = 3, c = 19, s = 23;
  auto const a = test::deviates<T>(n, c, s, 1), b = test::deviates<T>(n, c, s, 2),
             x = test::deviates<T>(n, c, s, 3, 100);
  for (int terms = 0; terms < 8; ++terms) {
    auto const channels = make_channels(c, terms);
    std::vector<long double> expected;
    for (std::size_t i = 0; i < x.size(); ++i) {
      auto const& k = channels[i / static_cast<std::size_t>(s) % static_cast<std::size_t>(c)];
      expected.push_back(k.scale_a * static_cast<long double>(a[i]) + k.scale_b * static_cast<long double>(b[i]) +
                         (static_cast<long double>(x[i]) - static_cast<long double>(k.mean)) * k.scale_x + k.shift);
    }
    for (auto const order : test::arrangements)
      for (bool const given : {true, false}) { // what is no term: full of infinities, or not there
        CAPTURE(test::name_of(order));
        CAPTURE(terms);
        auto const make = [&](int bit, std::vector<T> values) {
          if ((terms & bit) == 0) values.assign(values.size(), T(std::numeric_limits<float>::infinity()));
          return test::tensor<T>{order, n, c, s, values};
        };
        auto of_a = make(1, a), of_b = make(2, b), of_x = make(4, x);
        auto const view = [&](int bit, test::tensor<T>& of) {
          tensor_view<T const> term;
          if (given || (terms & bit) != 0) term = of.view();
          return term;
        };
        test::tensor<T> out{order, n, c, s};
        host::combine<T>(host::serial_executor{}, view(1, of_a), view(2, of_b), view(4, of_x), out.view(), channels);
        // x is near its mean: what is left of its rounding is that of the elements alone.
        double const tolerance = sizeof(T) == 2 ? 0x1p-10 : test::accuracy<T>;
        CHECK(test::error_of(out.values(), expected) <= tolerance);
        CHECK(out.intact());
      }
  }
}

TEST_CASE("where positions do not count, a combination is its second term, if it has one") {
  std::vector<double> const a{1, 2, 3, 4}, b{10, 20, 30, 40}, x{1, 1, 1, 1};
  std::vector<unsigned char> const mask{1, 0, 0, 1};
  host::detail::prepared_mask const counted{mask_of(mask.data(), 1, 4), 4};
  auto const view = [](std::vector<double> const& values) { return nchw(values.data(), 1, 1, 4); };
  std::vector<double> out(4);
  auto const run = [&](combination const& channel, tensor_view<double const> of_b) {
    host::combine_counted<double>(host::serial_executor{}, view(a), of_b, view(x), nchw(out.data(), 1, 1, 4),
                                  std::vector{channel}, &counted);
    return out;
  };
  CHECK(run({2, 0.5, 0, 0, 1}, view(b)) == std::vector<double>{8, 10, 15, 29});
  CHECK(run({2, 0, 0, 0, 1}, {}) == std::vector<double>{3, 0, 0, 9});
}

TEST_CASE_TEMPLATE("a combination that an activation lets back is rounded once", T, float,
                   float16 AND_UNSANITIZED(double)) {
  constexpr std::int64_t n = 3, c = 19, s = 23;
  auto const a = test::deviates<T>(n, c, s, 1), b = test::deviates<T>(n, c, s, 2),
             x = test::deviates<T>(n, c, s, 3, 100), residual = test::deviates<T>(n, c, s, 4);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(n * s));
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 0;
  std::vector<float> gamma, beta;
  std::vector<double> mean, inv_std;
  for (int i = 0; i < static_cast<int>(c); ++i) {
    gamma.push_back(static_cast<float>(i % 4) - 1.5F);
    beta.push_back(static_cast<float>(i % 3) / 8 - 0.0625F);
    mean.push_back(100.1 + i);
    inv_std.push_back(0.5 + i / 16.0);
  }
  constexpr double slope = 1.0 / 64;
  for (int terms = 0; terms < 8; ++terms) {
    for (bool const has_residual : {false, true}) {
      auto channels = make_channels(c, terms);
      // More than float16 holds, before the slope.
      channels[6].shift += 1e5;
      std::vector<long double> expected;
      bool large = false;
      for (std::size_t i = 0; i < x.size(); ++i) {
        auto const channel = i / static_cast<std::size_t>(s) % static_cast<std::size_t>(c);
        auto const& k = channels[channel];
        long double const d = static_cast<long double>(x[i]) - static_cast<long double>(k.mean);
        long double const v = d * inv_std[channel] * gamma[channel] + beta[channel] +
                              (has_residual ? static_cast<long double>(residual[i]) : 0);
        long double const sum = k.scale_a * static_cast<long double>(a[i]) +
                                k.scale_b * static_cast<long double>(b[i]) + d * k.scale_x + k.shift;
        bool const counts =
            mask[i / static_cast<std::size_t>(c * s) * static_cast<std::size_t>(s) + i % static_cast<std::size_t>(s)] !=
            0;
        expected.push_back(!counts ? 0 : v > 0 ? sum : sum * slope);
        large |= counts && v <= 0 && channel == 6;
      }
      CHECK(large);
      for (auto const order : test::arrangements) {
        CAPTURE(test::name_of(order));
        CAPTURE(terms);
        CAPTURE(has_residual);
        test::tensor<T> of_a{order, n, c, s, a}, of_b{order, n, c, s, b}, of_x{order, n, c, s, x},
            of_residual{order, n, c, s, residual}, out{order, n, c, s};
        batch_norm_epilogue<T> epilogue{{slope}, {}, mask_of(mask.data(), n, s), masked_outputs::zero};
        if (has_residual) epilogue.residual = of_residual.view();
        host::combine_gated<T>(host::serial_executor{}, of_a.view(), of_b.view(), of_x.view(), out.view(), channels,
                               mean, inv_std, affine_parameters<float>{gamma, beta}, epilogue);
        auto const got = out.values();
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (std::abs(expected[i]) > 6e4L && sizeof(T) == 2) continue; // infinite as it should be, or nearly
          long double const scale =
              1 + std::abs(expected[i]) +
              (i / static_cast<std::size_t>(s) % static_cast<std::size_t>(c) == 6 ? 1e5L * slope : 0);
          double const tolerance = sizeof(T) == 2 ? 0x1p-10 : 16 * test::accuracy<T>;
          CHECK(static_cast<double>(
                    std::abs(static_cast<long double>(static_cast<accumulate_t<T>>(got[i])) - expected[i]) / scale) <=
                tolerance);
        }
        CHECK(out.intact());
      }
    }
  }
}
