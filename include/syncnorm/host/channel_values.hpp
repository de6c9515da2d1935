#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>

namespace syncnorm::host {

/// The `[C]` values of a parameter, of any type, as doubles, or one number where there are none. Primitives take it so that
/// they are compiled once for all types of parameters. Borrows the values.
class channel_values {
public:
  channel_values() = default;
  template <class P>
  channel_values(std::span<P> values, double otherwise = 1)
      : values_{values.data()}, otherwise_{otherwise}, kind_{values.empty() ? kind::none
                                                                            : kind_of<std::remove_const_t<P>>()},
        size_{sizeof(P)}, read_{read<std::remove_const_t<P>>} {}

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

  /// Of the channels from `first` on.
  [[nodiscard]] channel_values from(std::int64_t first) const {
    auto part = *this;
    if (kind_ != kind::none)
      part.values_ = static_cast<std::byte const*>(values_) + static_cast<std::size_t>(first) * size_;
    return part;
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

  void const* values_ = nullptr;
  double otherwise_ = 1;
  kind kind_ = kind::none;
  std::size_t size_ = 0;
  double (*read_)(void const*, std::size_t) = nullptr;
};

/// Parameters of any type. An empty gamma stands for 1, an empty beta for 0.
struct affine_values {
  channel_values gamma{}, beta{std::span<double const>{}, 0};

  affine_values() = default;
  template <class P>
  affine_values(affine_parameters<P> const& of) : gamma{of.gamma, 1}, beta{of.beta, 0} {}

  /// Of the channels from `first` on.
  [[nodiscard]] affine_values from(std::int64_t first) const {
    auto part = *this;
    part.gamma = gamma.from(first);
    part.beta = beta.from(first);
    return part;
  }
};

} // namespace syncnorm::host
