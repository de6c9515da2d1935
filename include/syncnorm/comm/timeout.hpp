#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// How long a collective waits for its peers unless the communicator was made with another timeout.
inline constexpr std::chrono::milliseconds default_timeout = std::chrono::minutes{5};

namespace detail {

/// `timeout` as it was given to `whom`, or a year where it is longer, so that a deadline is a point in time that a clock can express.
/// Throws invalid_argument_error where it is not positive.
[[nodiscard]] inline std::chrono::milliseconds checked_timeout(char const* whom, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0)
    throw invalid_argument_error{std::string{whom} + ": timeout " + std::to_string(timeout.count()) +
                                 " ms, expected more than 0"};
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours{24 * 365});
}

} // namespace detail

} // namespace syncnorm
