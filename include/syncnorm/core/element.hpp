#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/core/detail/cache_line.hpp>

namespace syncnorm {

/// What the bits of a 16-bit element mean: IEEE 754's binary16, or the upper half of a binary32.
enum class element_format : std::uint8_t { other, binary16, bfloat16 };

/// Describes an element type of a tensor. Specialize it for a type of your own:
///
///     template <> struct syncnorm::element_traits<my_half> {
///       using accumulate_type = float;                      // what sums of it are kept in: float or double
///       static constexpr std::string_view name = "float16"; // at most 15 characters; ranks compare it
///       static constexpr auto format = syncnorm::element_format::binary16; // optional
///     };
///
/// The type must be trivially copyable, of a power of two bytes, 64 at most, have a default constructor, and convert explicitly to and
/// from `accumulate_type`, or else the traits have functions that do:
///
///       static float to_accumulate(my_half value);
///       static my_half from_accumulate(float sum);
///
/// With a format, which wants `float` for `accumulate_type`, tensors of it are converted a vector at a time, whatever conversions
/// the type has.
template <class T>
struct element_traits;

template <>
struct element_traits<float> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float";
};

template <>
struct element_traits<double> {
  using accumulate_type = double;
  static constexpr std::string_view name = "double";
};

/// Integers of 8 bits, for inference. What is computed is rounded to the next one, a tie to the even one, and beyond them to the first or
/// the last; what is no number becomes the first.
template <>
struct element_traits<std::int8_t> {
  using accumulate_type = float;
  static constexpr std::string_view name = "int8";

  [[nodiscard]] SYNCNORM_HOST_DEVICE static constexpr float to_accumulate(std::int8_t value) {
    return static_cast<float>(value);
  }
  [[nodiscard]] SYNCNORM_HOST_DEVICE static constexpr std::int8_t from_accumulate(float sum) {
    float held = sum > -128.0F ? sum : -128.0F;
    held = held < 127.0F ? held : 127.0F;
    // A float that great holds integers, in its last bits.
    constexpr float shift = 0x1.8p23F;
    return static_cast<std::int8_t>(__builtin_bit_cast(std::int32_t, held + shift) -
                                    __builtin_bit_cast(std::int32_t, shift));
  }
};

/// The type in which sums of a few `T` are kept, and the default type of parameters and statistics.
template <class T>
using accumulate_t = typename element_traits<std::remove_cv_t<T>>::accumulate_type;

/// The format of `T`, where element_traits gives one.
template <class T>
inline constexpr element_format format_of = [] {
  using traits = element_traits<std::remove_cv_t<T>>;
  if constexpr (requires { traits::format; }) {
    static_assert(sizeof(T) == 2 && std::is_same_v<typename traits::accumulate_type, float>,
                  "element_traits: a type with a format has 16 bits, and float for its accumulate_type");
    return element_format{traits::format};
  } else {
    return element_format::other;
  }
}();

namespace detail {

template <class T>
concept traits_convert = requires(T value, accumulate_t<T> sum) {
  { element_traits<std::remove_cv_t<T>>::to_accumulate(value) } -> std::same_as<accumulate_t<T>>;
  { element_traits<std::remove_cv_t<T>>::from_accumulate(sum) } -> std::same_as<std::remove_cv_t<T>>;
};

template <class T>
concept converts = requires(T value, accumulate_t<T> sum) {
  static_cast<accumulate_t<T>>(value);
  static_cast<T>(sum);
};

/// The `Real` next to `value`, or `value` itself, that rounds to fewer bits as `value` does: the last bit of an inexact one
/// is odd, so that it is never taken for a tie.
template <class Real, class Wide>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr Real next_odd(Wide value) {
  using bits_type = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  auto const near = static_cast<Real>(value);
  auto const bits = __builtin_bit_cast(bits_type, near);
  auto const back = static_cast<Wide>(near);
  bool const below = back < value;
  bool const above = back > value;
  if (!(below || above) || (bits & 1u) != 0) return near; // exact, or no number
  return __builtin_bit_cast(Real, (value < 0 ? below : above) ? bits - 1 : bits + 1);
}

/// The same as a float, of a number of any type.
template <class Number>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr float round_to_odd(Number value) {
  if constexpr (std::is_integral_v<Number> && sizeof(Number) == 8) {
    // Beyond what double holds, the last bits are told by the one before them.
    constexpr Number end = Number{1} << 53, last = (Number{1} << 11) - 1;
    bool const held = value < end && (std::is_unsigned_v<Number> || value > Number{0} - end);
    if (!held) value = (value & ~last) | ((value & last) != 0 ? last + 1 : 0);
  }
  return next_odd<float>(static_cast<double>(value));
}
template <std::same_as<long double> Number>
[[nodiscard]] constexpr float round_to_odd(Number value) {
  return next_odd<float>(next_odd<double>(value));
}

/// Whether so many elements make up a line of the cache.
template <class T>
inline constexpr bool divides_cache_line = std::has_single_bit(sizeof(T)) && sizeof(T) <= cache_line;

} // namespace detail

/// A type that tensors can hold.
template <class T>
concept element = std::is_trivially_copyable_v<T> && detail::divides_cache_line<T> &&
    std::default_initializable<std::remove_cv_t<T>> && requires {
  { element_traits<std::remove_cv_t<T>>::name } -> std::convertible_to<std::string_view>;
  requires std::is_same_v < accumulate_t<T>,
  float > || std::is_same_v<accumulate_t<T>, double>;
} &&(detail::traits_convert<T> || detail::converts<T>);

/// One that can be written.
template <class T>
concept mutable_element = element<T> && !std::is_const_v<T>;

/// An element in the type of its sums, which holds it exactly.
SYNCNORM_CALLS_EITHER
template <element T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr accumulate_t<T> to_accumulate(T value) {
  if constexpr (detail::traits_convert<T>)
    return element_traits<T>::to_accumulate(value);
  else
    return static_cast<accumulate_t<T>>(value);
}

/// A sum rounded to an element.
SYNCNORM_CALLS_EITHER
template <element T>
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr T from_accumulate(accumulate_t<T> sum) {
  if constexpr (detail::traits_convert<T>)
    return element_traits<T>::from_accumulate(sum);
  else
    return static_cast<T>(sum);
}

/// A parameter or a statistic as a double, which holds each exactly.
template <element P>
[[nodiscard]] constexpr double as_double(P value) {
  return static_cast<double>(to_accumulate(value));
}

/// A double rounded to the type of a parameter or a statistic: once, where a type of 16 bits is made of floats, too.
template <element P>
[[nodiscard]] constexpr P from_double(double value) {
  if constexpr (sizeof(P) == 2 && std::is_same_v<accumulate_t<P>, float>)
    return from_accumulate<P>(detail::round_to_odd(value));
  else
    return from_accumulate<P>(static_cast<accumulate_t<P>>(value));
}

} // namespace syncnorm
