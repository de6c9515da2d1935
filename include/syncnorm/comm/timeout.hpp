#pragma once

#include <algorithm>
#include <chrono>

namespace syncnorm {

/// How long a collective waits for its peers unless the communicator was made with another timeout.
inline constexpr std::chrono::milliseconds default_timeout = std::chrono::minutes{5};

namespace detail {

/// `timeout`, or a year where it is longer, so that a deadline is a point in time that a clock can express.
[[nodiscard]] constexpr std::chrono::milliseconds within_a_year(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours{24 * 365});
}

} // namespace detail

} // namespace syncnorm
