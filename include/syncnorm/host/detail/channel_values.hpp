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
      : values_{values.data()}, otherwise_{otherwise}, read_{values.empty() ? nullptr : read<std::remove_const_t<P>>} {}

  [[nodiscard]] double operator[](std::size_t channel) const {
    return read_ == nullptr ? otherwise_ : read_(values_, channel);
  }

private:
  template <class P>
  static double read(void const* values, std::size_t channel) {
    return as_double(static_cast<P const*>(values)[channel]);
  }

  void const* values_;
  double otherwise_;
  double (*read_)(void const*, std::size_t);
};

} // namespace syncnorm::host::detail
