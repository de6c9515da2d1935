#pragma once

#include <chrono>
#include <string>
#include <utility>

#include <syncnorm/adapters/gloo_context.hpp>

namespace test_support {

inline syncnorm::gloo_context_options loopback(std::chrono::milliseconds timeout = std::chrono::seconds{60},
                                               std::string prefix = "run") {
  return {.hostname = "127.0.0.1", .timeout = timeout, .prefix = std::move(prefix)};
}

} // namespace test_support
