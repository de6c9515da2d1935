#pragma once

#include <string>

#include <syncnorm/core/error.hpp>

namespace test_support {

/// What the error says that a call throws.
std::string message_of(auto const& call) {
  try {
    call();
  } catch (syncnorm::error const& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

inline bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

} // namespace test_support
