#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <doctest/doctest.h>
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/half.hpp>

using syncnorm::bfloat16;
using syncnorm::element_format;
using syncnorm::float16;

namespace {

/// A 16-bit format by its definition, in long double.
template <class T>
struct definition {
  static constexpr int exponent_bits = std::is_same_v<T, float16> ? 5 : 8, mantissa_bits = 15 - exponent_bits,
                       bias = (1 << (exponent_bits - 1)) - 1;

  static long double value(unsigned bits) {
    int const exponent = static_cast<int>(bits >> mantissa_bits & ((1U << exponent_bits) - 1));
    auto const mantissa = static_cast<long double>(bits & ((1U << mantissa_bits) - 1));
    long double const sign = (bits & 0x8000U) != 0 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1)
      return mantissa == 0 ? sign * std::numeric_limits<long double>::infinity()
                           : std::numeric_limits<long double>::quiet_NaN();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1U << mantissa_bits), exponent - bias - mantissa_bits);
  }
};

bool is_nan_pattern(long double value) { return std::isnan(value); }

/// Whether elements `T` and sums become each other as they do of `Own`, of the same format.
template <class T, class Own>
void check_as() {
  int wrong = 0;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    auto const own = Own::from_bits(static_cast<std::uint16_t>(bits));
    float const value = own, found = syncnorm::to_accumulate(std::bit_cast<T>(own));
    wrong += found != value && !(std::isnan(found) && std::isnan(value));
    if (std::isnan(value)) continue;
    for (float const sum : {value, value * 1.0004F, value * 1.0006F, value * 1.003F, value * 1.005F})
      wrong += std::bit_cast<std::uint16_t>(syncnorm::from_accumulate<T>(sum)) != Own{sum}.bits();
  }
  CHECK(wrong == 0);
}

} // namespace

TEST_CASE_TEMPLATE("all 65536 patterns have the value that their format defines, and come back", T, float16, bfloat16) {
  static_assert(sizeof(T) == 2 && syncnorm::element<T> && std::is_trivially_copyable_v<T>);
  int wrong = 0;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    auto const element = T::from_bits(static_cast<std::uint16_t>(bits));
    long double const expected = definition<T>::value(bits);
    float const value = element;
    T const back{value};
    if (is_nan_pattern(expected)) {
      wrong +=
          !std::isnan(value) || !std::isnan(static_cast<float>(back)) || (back.bits() & 0x8000U) != (bits & 0x8000U);
    } else {
      wrong += static_cast<long double>(value) != expected || back.bits() != bits;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("numbers between two patterns go to the nearer one, ties to the even one", T, float16, bfloat16) {
  int wrong = 0;
  unsigned const infinity = std::is_same_v<T, float16> ? 0x7c00 : 0x7f80;
  for (unsigned bits = 0; bits < infinity; ++bits) {
    auto const low = definition<T>::value(bits);
    // Beyond the greatest number lies infinity, where the next number would be.
    auto const high = bits + 1 == infinity ? 2 * low - definition<T>::value(bits - 1) : definition<T>::value(bits + 1);
    auto const middle = static_cast<double>((low + high) / 2);
    unsigned const even = bits % 2 == 0 ? bits : bits + 1;
    for (double const sign : {1.0, -1.0}) {
      auto const is = [&](auto number, unsigned expected) {
        return T{number}.bits() == (expected | (sign < 0 ? 0x8000U : 0U));
      };
      auto const tie = static_cast<float>(middle);
      wrong += static_cast<double>(tie) != middle; // a tie of these formats is a float
      wrong += !is(static_cast<float>(sign) * tie, even);
      wrong += !is(static_cast<float>(sign) * std::nextafter(tie, 0.0F), bits);
      wrong += !is(static_cast<float>(sign) * std::nextafter(tie, INFINITY), bits + 1);
      // From double at once: rounded to float first, these would be ties.
      wrong += !is(sign * std::nextafter(middle, 0.0), bits);
      wrong += !is(sign * std::nextafter(middle, INFINITY), bits + 1);
      wrong += syncnorm::from_double<T>(sign * std::nextafter(middle, 0.0)).bits() % 0x8000 != bits;
      wrong += syncnorm::from_double<T>(sign * std::nextafter(middle, INFINITY)).bits() % 0x8000 != bits + 1;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("numbers that double does not hold are rounded once, too", T, float16, bfloat16) {
  // 1, what comes after it, and beside the middle of these a part of that which double leaves out.
  long double const one = 1, next = definition<T>::value(T{1}.bits() + 1U), middle = (one + next) / 2;
  if (std::numeric_limits<long double>::digits > std::numeric_limits<double>::digits) {
    CHECK(T{middle}.bits() == T{1}.bits());
    CHECK(T{middle + 0x1p-60L}.bits() == T{1}.bits() + 1);
    CHECK(T{middle - 0x1p-60L}.bits() == T{1}.bits());
    CHECK(T{-middle - 0x1p-60L}.bits() == T{-1}.bits() + 1);
  }
  if (std::is_same_v<T, bfloat16>) {
    constexpr std::int64_t tie = (std::int64_t{1} << 62) + (std::int64_t{1} << 54);
    CHECK(static_cast<float>(T{tie}) == 0x1p62F);
    CHECK(static_cast<float>(T{tie + 1}) == 0x1p62F + 0x1p55F);
    CHECK(static_cast<float>(T{-tie - 1}) == -0x1p62F - 0x1p55F);
    CHECK(static_cast<float>(T{std::numeric_limits<std::uint64_t>::max()}) == 0x1p64F);
  }
  CHECK(std::isinf(static_cast<float>(T{std::numeric_limits<long double>::max()})));
  CHECK(T{std::numeric_limits<long double>::denorm_min()}.bits() == 0);
}

TEST_CASE_TEMPLATE("numbers of all kinds convert", T, float16, bfloat16) {
  static_assert(static_cast<float>(T{1}) == 1 && static_cast<float>(T{-2.5}) == -2.5F);
  static_assert(!std::is_convertible_v<float, T>); // no rounding that nobody asked for
  CHECK(static_cast<double>(T{3}) == 3);
  CHECK(T{}.bits() == 0);
  CHECK(std::isnan(static_cast<float>(T{std::numeric_limits<double>::quiet_NaN()})));
  CHECK(static_cast<float>(T{1e300}) == std::numeric_limits<float>::infinity());
  CHECK(static_cast<float>(T{-std::numeric_limits<float>::infinity()}) == -std::numeric_limits<float>::infinity());
  CHECK(T{-1e-300}.bits() == 0x8000);
  CHECK(T{1.0F} == T{1});
  CHECK(T{1.0F} < T{2});
}

TEST_CASE("the formats are known of all types that name them") {
  static_assert(syncnorm::format_of<float16> == element_format::binary16);
  static_assert(syncnorm::format_of<bfloat16 const> == element_format::bfloat16);
  static_assert(syncnorm::format_of<float> == element_format::other);
#if SYNCNORM_HAS_FLOAT16
  static_assert(syncnorm::element<_Float16> && syncnorm::format_of<_Float16> == element_format::binary16);
  for (unsigned bits = 0; bits < 0x7c00; ++bits) {
    auto const own = float16::from_bits(static_cast<std::uint16_t>(bits));
    if (static_cast<float>(std::bit_cast<_Float16>(own)) != static_cast<float>(own)) FAIL_CHECK(bits);
  }
#endif
#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>)
  static_assert(syncnorm::element<__half> && syncnorm::format_of<__half> == element_format::binary16);
  static_assert(syncnorm::element<__nv_bfloat16> && syncnorm::format_of<__nv_bfloat16> == element_format::bfloat16);
  check_as<__half, float16>();
  check_as<__nv_bfloat16, bfloat16>();
#endif
  CHECK(syncnorm::element_traits<float16>::name == "float16");
}

TEST_CASE("parameters of every type go through double and back") {
  CHECK(syncnorm::as_double(float16{0.25}) == 0.25);
  CHECK(syncnorm::from_double<bfloat16>(0.25).bits() == bfloat16{0.25F}.bits());
  CHECK(syncnorm::from_double<float>(0.1) == 0.1F);
  CHECK(syncnorm::as_double(0.1) == 0.1);
}
