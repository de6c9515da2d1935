#pragma once

#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace test {

/// `f()` throws an `Error` whose message has all of `parts`.
template <class Error, class F>
void check_throws(F const& f, std::vector<std::string> const& parts) {
  try {
    f();
    FAIL_CHECK("nothing thrown, expected: " << parts.front());
  } catch (Error const& error) {
    std::string const message = error.what();
    for (auto const& part : parts)
      CHECK_MESSAGE(message.find(part) != std::string::npos, "no \"" << part << "\" in: " << message);
    CHECK(error.where().line() > 0);
  }
}

} // namespace test
