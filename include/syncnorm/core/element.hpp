#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>

namespace syncnorm {

/// Describes an element type of a tensor. Specialize it for a type of your own:
///
///     template <> struct syncnorm::element_traits<my_half> {
///       using accumulate_type = float;                    // what sums of it are kept in
///       static constexpr std::string_view name = "half";  // at most 15 characters; ranks compare it
///     };
///
/// The type must convert explicitly to and from `accumulate_type`.
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

/// A type that tensors can hold.
template <class T>
concept element = std::is_trivially_copyable_v<T> && requires(T value, accumulate_t<T> sum) {
  { element_traits<std::remove_cv_t<T>>::name } -> std::convertible_to<std::string_view>;
  static_cast<accumulate_t<T>>(value);
  static_cast<T>(sum);
};

} // namespace syncnorm
