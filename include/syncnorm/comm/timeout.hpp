#pragma once

#include <chrono>

namespace syncnorm {

/// How long a collective waits for its peers unless the communicator was made with another timeout.
inline constexpr std::chrono::milliseconds default_timeout = std::chrono::minutes{5};

} // namespace syncnorm
