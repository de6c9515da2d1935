#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/core/element.hpp>

namespace syncnorm {

namespace detail {

/// `value` in binary16, rounded to the nearest, ties to even. A NaN stays one, with the upper bits of its payload.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::uint16_t to_binary16(float value) {
  auto const all = __builtin_bit_cast(std::uint32_t, value);
  std::uint32_t const sign = all >> 16 & 0x8000u, magnitude = all & 0x7fffffffu;
  std::uint32_t bits = 0;
  if (magnitude > 0x7f800000u) {
    bits = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {
    bits = 0x7c00u; // 2^16 and beyond
  } else if (magnitude < 0x38800000u) {
    // Subnormal: added to 1/2, whose last bit is worth 2^-24, it is rounded by the addition.
    bits = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  } else {
    bits = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | bits);
}

[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr float from_binary16(std::uint16_t bits) {
  std::uint32_t const sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  std::uint32_t all = 0;
  if (magnitude > 0x7c00u) {
    all = magnitude << 13 | 0x7fc00000u;
  } else if (magnitude == 0x7c00u) {
    all = 0x7f800000u;
  } else if (magnitude < 0x400u) {
    all = __builtin_bit_cast(std::uint32_t, static_cast<float>(magnitude) * 0x1p-24f);
  } else {
    all = (magnitude << 13) + 0x38000000u;
  }
  return __builtin_bit_cast(float, sign | all);
}

/// The same for the upper half of a binary32.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::uint16_t to_bfloat16(float value) {
  auto const all = __builtin_bit_cast(std::uint32_t, value);
  if ((all & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(all >> 16 | 0x40u);
  return static_cast<std::uint16_t>((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
}

[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr float from_bfloat16(std::uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

} // namespace detail

/// IEEE 754's binary16: 11 bits of precision, up to 65504. Arithmetic is that of float, to which it converts.
class float16 {
public:
  float16() = default;
  SYNCNORM_CALLS_EITHER
  template <class Number>
  requires std::is_arithmetic_v<Number> SYNCNORM_HOST_DEVICE explicit constexpr float16(Number value)
      : bits_{detail::to_binary16(detail::round_to_odd(value))} {}
  SYNCNORM_HOST_DEVICE explicit constexpr float16(float value) : bits_{detail::to_binary16(value)} {}

  SYNCNORM_HOST_DEVICE constexpr operator float() const { return detail::from_binary16(bits_); }

  [[nodiscard]] SYNCNORM_HOST_DEVICE static constexpr float16 from_bits(std::uint16_t bits) {
    float16 made;
    made.bits_ = bits;
    return made;
  }
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::uint16_t bits() const { return bits_; }

private:
  std::uint16_t bits_ = 0;
};

/// The upper half of a float: 8 bits of precision, and the range of float. Arithmetic is that of float.
class bfloat16 {
public:
  bfloat16() = default;
  SYNCNORM_CALLS_EITHER
  template <class Number>
  requires std::is_arithmetic_v<Number> SYNCNORM_HOST_DEVICE explicit constexpr bfloat16(Number value)
      : bits_{detail::to_bfloat16(detail::round_to_odd(value))} {}
  SYNCNORM_HOST_DEVICE explicit constexpr bfloat16(float value) : bits_{detail::to_bfloat16(value)} {}

  SYNCNORM_HOST_DEVICE constexpr operator float() const { return detail::from_bfloat16(bits_); }

  [[nodiscard]] SYNCNORM_HOST_DEVICE static constexpr bfloat16 from_bits(std::uint16_t bits) {
    bfloat16 made;
    made.bits_ = bits;
    return made;
  }
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::uint16_t bits() const { return bits_; }

private:
  std::uint16_t bits_ = 0;
};

template <>
struct element_traits<float16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float16";
  static constexpr auto format = element_format::binary16;
};

template <>
struct element_traits<bfloat16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "bfloat16";
  static constexpr auto format = element_format::bfloat16;
};

#if SYNCNORM_HAS_FLOAT16
/// The compiler's own binary16, which is also std::float16_t where there is one.
template <>
struct element_traits<_Float16> {
  using accumulate_type = float;
  static constexpr std::string_view name = "float16";
  static constexpr auto format = element_format::binary16;
};
#endif

} // namespace syncnorm
