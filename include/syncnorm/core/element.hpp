#pragma once

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace syncnorm {

/// What the bits of a 16-bit element mean: IEEE 754's binary16, or the upper half of a binary32.
enum class element_format : std::uint8_t { other, binary16, bfloat16 };

/// Describes an element type of a tensor. Specialize it for a type of your own:
///
///     template <> struct syncnorm::element_traits<my_half> {
///       using accumulate_type = float;                      // what sums of it are kept in
///       static constexpr std::string_view name = "float16"; // at most 15 characters; ranks compare it
///       static constexpr auto format = syncnorm::element_format::binary16; // optional
///     };
///
/// The type must convert explicitly to and from `accumulate_type`. With a format, which wants `float` for that, tensors
/// of it are converted a vector at a time, whatever conversions the type has.
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

/// The type in which sums of a few `T` are kept, and the default type of parameters and statistics.
template <class T>
using accumulate_t = typename element_traits<std::remove_cv_t<T>>::accumulate_type;

/// The format of `T`, where element_traits gives one.
template <class T>
inline constexpr element_format format_of = [] {
  using traits = element_traits<std::remove_cv_t<T>>;
  if constexpr (requires { traits::format; }) {
    static_assert(sizeof(T) == 2 && std::is_same_v<typename traits::accumulate_type, float>);
    return element_format{traits::format};
  } else {
    return element_format::other;
  }
}();

/// A type that tensors can hold.
template <class T>
concept element = std::is_trivially_copyable_v<T> && requires(T value, accumulate_t<T> sum) {
  { element_traits<std::remove_cv_t<T>>::name } -> std::convertible_to<std::string_view>;
  static_cast<accumulate_t<T>>(value);
  static_cast<T>(sum);
};

/// A parameter or a statistic as a double, which holds each exactly.
template <element P>
[[nodiscard]] constexpr double as_double(P value) {
  return static_cast<double>(static_cast<accumulate_t<P>>(value));
}

/// A double rounded to the type of a parameter or a statistic.
template <element P>
[[nodiscard]] constexpr P from_double(double value) {
  return static_cast<P>(static_cast<accumulate_t<P>>(value));
}

} // namespace syncnorm
