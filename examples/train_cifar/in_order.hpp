#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <syncnorm/comm/any.hpp>

namespace train_cifar {

/// A line of every rank, in rank order, on every rank. Lines are cut after 120 characters. Collective.
[[nodiscard]] inline std::vector<std::string> gather_lines(syncnorm::any_communicator const& comm,
                                                           std::string_view line) {
  constexpr std::size_t width = 120;
  std::vector<std::byte> own(width, std::byte{' '});
  std::ranges::copy(std::as_bytes(std::span{line.substr(0, width)}), own.begin());
  std::vector<std::byte> all(width * static_cast<std::size_t>(syncnorm::size(comm)));
  syncnorm::allgather(comm, own, std::span{all});
  std::vector<std::string> lines;
  for (std::size_t first = 0; first < all.size(); first += width) {
    std::string_view const padded{reinterpret_cast<char const*>(&all[first]), width};
    lines.emplace_back(padded.substr(0, padded.find_last_not_of(' ') + 1));
  }
  return lines;
}

/// Prints a line of each rank, in rank order, whatever host the rank is on: rank 0 gathers them. A rank that is quiet
/// has no line; where rank 0 is, nothing is printed. Collective.
inline void print_in_order(syncnorm::any_communicator const& comm, std::string_view line, bool quiet) {
  auto const lines = gather_lines(comm, quiet ? std::string_view{} : line);
  if (quiet || syncnorm::rank(comm) != 0) return;
  for (auto const& each : lines)
    if (!each.empty()) std::puts(each.c_str());
  std::fflush(stdout);
}

} // namespace train_cifar
