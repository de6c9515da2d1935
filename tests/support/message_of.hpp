#pragma once

#include <exception>
#include <string>

#include <syncnorm/core/error.hpp>

namespace test_support {

/// What a call throws as an `Error`, which is the only thing that it may throw; empty: nothing.
template <class Error = std::exception>
std::string thrown(auto const& call) {
  try {
    call();
  } catch (Error const& failure) {
    return failure.what();
  }
  return {};
}

/// The same of a call that is expected to throw.
template <class Error = syncnorm::error>
std::string message_of(auto const& call) {
  auto const text = thrown<Error>(call);
  return text.empty() ? "nothing was thrown" : text;
}

inline bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

} // namespace test_support
