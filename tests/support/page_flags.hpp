#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace test_support {

/// Whether huge pages are asked for where `address` is, as the system says; none where it does not, or has no such pages.
[[nodiscard]] inline std::optional<bool> asks_for_huge_pages(void const* address) {
  if (!std::ifstream{"/sys/kernel/mm/transparent_hugepage/enabled"}) return std::nullopt;
  auto const wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream maps{"/proc/self/smaps"};
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words{line};
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') here = begin <= wanted && wanted < end;
    if (here && line.rfind("VmFlags:", 0) == 0) return (line + ' ').find(" hg ") != std::string::npos;
  }
  return std::nullopt;
}

} // namespace test_support
