#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include <doctest/doctest.h>

#include <syncnorm/host/detail/exponential.hpp>

namespace {

namespace vectors = syncnorm::host::detail;

/// Checks that results are off from what is exact by no more than their last bit, over all that a lane may hold, and that vectors give
/// the bits of numbers.
template <class A, class Vector, class Single, class Exact>
void check_bits(Vector const& of_vector, Single const& of_number, Exact const& exact) {
  constexpr int lanes = vectors::native_lanes<A>;
  double worst = 0;
  bool same = true;
  double at = 0;
  while (at > std::log(std::numeric_limits<A>::min())) {
    vectors::vector_t<A, lanes> v{};
    if constexpr (lanes == 1) {
      v = static_cast<A>(at);
    } else {
      for (int i = 0; i < lanes; ++i) v[i] = static_cast<A>(at * (1 - 0.01 * i));
    }
    auto const got = of_vector(v);
    for (int i = 0; i < lanes; ++i) {
      A const value = vectors::reinterpret<std::array<A, lanes>>(v)[static_cast<std::size_t>(i)];
      A const result = vectors::reinterpret<std::array<A, lanes>>(got)[static_cast<std::size_t>(i)];
      long double const expected = exact(static_cast<long double>(value));
      if (expected != 0) worst = std::max(worst, static_cast<double>(std::abs(result - expected) / std::abs(expected)));
      same = same && result == of_number(value);
    }
    at = at * 1.001 - 1e-6;
  }
  CHECK(worst <= static_cast<double>(std::numeric_limits<A>::epsilon()));
  CHECK(same);
}

} // namespace

TEST_CASE_TEMPLATE("the exponential of what is not positive is exact but for its last bit", A, float, double) {
  check_bits<A>([](auto const& v) { return vectors::exponential(v); }, [](A v) { return vectors::exponential(v); },
                [](long double v) { return std::exp(v); });
  check_bits<A>([](auto const& v) { return vectors::exponential_minus_1(v); },
                [](A v) { return vectors::exponential_minus_1(v); }, [](long double v) { return std::expm1(v); });
}

TEST_CASE_TEMPLATE("beyond what numbers hold, an exponential is next to 0, and of what is no number none", A, float,
                   double) {
  constexpr A infinite = std::numeric_limits<A>::infinity(), least = std::numeric_limits<A>::min();
  for (A const v : {-infinite, std::numeric_limits<A>::lowest(), A(-1e4)}) {
    CHECK(vectors::exponential(v) >= 0);
    CHECK(vectors::exponential(v) <= 2 * least);
    CHECK(vectors::exponential_minus_1(v) == A(-1));
  }
  CHECK(vectors::exponential(A(0)) == A(1));
  CHECK(vectors::exponential_minus_1(A(0)) == A(0));
  constexpr A none = std::numeric_limits<A>::quiet_NaN();
  constexpr int lanes = vectors::native_lanes<A>;
  auto const all = vectors::reinterpret<std::array<A, lanes>>(vectors::exponential(vectors::splat<A, lanes>(none)));
  CHECK(std::ranges::all_of(all, [](A v) { return std::isnan(v); }));
  CHECK(std::isnan(vectors::exponential(none)));
  CHECK(std::isnan(vectors::exponential_minus_1(none)));
}
