#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <string>
#include <system_error>

namespace example {

/// Says what is wrong with the text of an option; empty where nothing is.
using text_check = std::function<std::string(std::string const&)>;

/// Accepts decimal whole numbers from `least` to `most`.
[[nodiscard]] inline text_check whole_number(std::uint64_t least, std::uint64_t most = 1'000'000'000) {
  return [=](std::string const& text) -> std::string {
    std::uint64_t value = 0;
    auto const [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    // CLI11 takes a leading zero for the sign of octal digits.
    bool const octal = text.size() > 1 && text.front() == '0';
    if (status == std::errc{} && end == text.data() + text.size() && !octal && value >= least && value <= most)
      return "";
    return "'" + text + "' is not a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  };
}

} // namespace example
