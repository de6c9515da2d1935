#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

/// Number c of a per-channel array as a double, or `otherwise` of an absent one.
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE double load_value(Hw const& hw, channel_values const& from, std::int64_t c,
                                                double otherwise) {
  if (from.data == nullptr) return otherwise;
  switch (from.kind) {
  case value_kind::float32:
    return static_cast<double>(hw.load(static_cast<float const*>(from.data) + c));
  case value_kind::float64:
    return hw.load(static_cast<double const*>(from.data) + c);
  case value_kind::float16:
    return static_cast<double>(
        syncnorm::detail::from_binary16(hw.load(static_cast<std::uint16_t const*>(from.data) + c)));
  case value_kind::bfloat16:
    return static_cast<double>(
        syncnorm::detail::from_bfloat16(hw.load(static_cast<std::uint16_t const*>(from.data) + c)));
  }
  return otherwise;
}

/// Writes number c, rounded once, as on the host. Of an absent array: nothing.
template <class Hw>
SYNCNORM_DEVICE void store_value(Hw const& hw, channel_outputs const& to, std::int64_t c, double value) {
  if (to.data == nullptr) return;
  switch (to.kind) {
  case value_kind::float32:
    return hw.store(static_cast<float*>(to.data) + c, static_cast<float>(value));
  case value_kind::float64:
    return hw.store(static_cast<double*>(to.data) + c, value);
  case value_kind::float16:
    return hw.store(static_cast<std::uint16_t*>(to.data) + c,
                    syncnorm::detail::to_binary16(syncnorm::detail::round_to_odd(value)));
  case value_kind::bfloat16:
    return hw.store(static_cast<std::uint16_t*>(to.data) + c,
                    syncnorm::detail::to_bfloat16(syncnorm::detail::round_to_odd(value)));
  }
}

/// Adds to number c.
template <class Hw>
SYNCNORM_DEVICE void add_value(Hw const& hw, channel_outputs const& to, std::int64_t c, double value) {
  if (to.data != nullptr) store_value(hw, to, c, load_value(hw, to, c, 0.0) + value);
}

} // namespace syncnorm::cuda::detail
