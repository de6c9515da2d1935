#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>

namespace syncnorm::host::detail {

/// The `[C]` values of a parameter, of any type, as doubles, or one number where there are none. Kernels take it so that
/// they are compiled once for all types of parameters.
class channel_values {
public:
  template <class P>
  channel_values(std::span<P> values, double otherwise)
      : values_{values.data()}, otherwise_{otherwise},
        kind_{values.empty() ? kind::none : kind_of<std::remove_const_t<P>>()}, read_{read<std::remove_const_t<P>>} {}

  [[nodiscard]] double operator[](std::size_t channel) const {
    switch (kind_) {
    case kind::none:
      return otherwise_;
    case kind::floats:
      return static_cast<double>(static_cast<float const*>(values_)[channel]);
    case kind::doubles:
      return static_cast<double const*>(values_)[channel];
    case kind::others:
      break;
    }
    return read_(values_, channel);
  }

private:
  /// What is read without a call of a function.
  enum class kind : std::uint8_t { none, floats, doubles, others };

  template <class P>
  static constexpr kind kind_of() {
    if (std::is_same_v<P, float>) return kind::floats;
    return std::is_same_v<P, double> ? kind::doubles : kind::others;
  }

  template <class P>
  static double read(void const* values, std::size_t channel) {
    return as_double(static_cast<P const*>(values)[channel]);
  }

  void const* values_;
  double otherwise_;
  kind kind_;
  double (*read_)(void const*, std::size_t);
};

} // namespace syncnorm::host::detail
