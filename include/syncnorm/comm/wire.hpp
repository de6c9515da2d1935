#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/config.hpp>

namespace syncnorm {

/// The types that cross ranks.
template <class T>
concept wire_type = std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, std::int32_t> ||
    std::same_as<T, std::int64_t> || std::same_as<T, std::byte>;

/// The wire types that can be reduced: all but `std::byte`.
template <class T>
concept reducible_type = wire_type<T> && !std::same_as<T, std::byte>;

enum class reduce_op : std::uint8_t { sum, min, max };

/// accumulator[i] = accumulator[i] ⊕ value[i].
template <reducible_type T>
void reduce_into(std::span<T> accumulator, std::span<T const> value, reduce_op op) {
  auto const apply = [&](auto combine) {
    for (std::size_t i = 0; i < accumulator.size(); ++i) accumulator[i] = combine(accumulator[i], value[i]);
  };
  switch (op) {
  case reduce_op::sum:
    return apply([](T a, T b) { return static_cast<T>(a + b); });
  case reduce_op::min:
    return apply([](T a, T b) { return std::min(a, b); });
  case reduce_op::max:
    return apply([](T a, T b) { return std::max(a, b); });
  }
}

} // namespace syncnorm
