#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// What every rank says about itself at the head of an exchange, so that what is wrong on one rank only is known to all
/// before any of them acts on the statistics.
struct packet_header {
  std::array<char, 24> pass{};    ///< the operation and its direction
  std::array<char, 16> element{}; ///< element_traits<T>::name
  std::int64_t channels = 0;
  std::int64_t count = 0; ///< elements of a channel on this rank; ranks may differ
  double eps = 0;
  double momentum = 0;               ///< −1: cumulative average
  std::int64_t running_variance = 0; ///< the option of this name
  std::int64_t tracks_running_statistics = 0;
  std::int64_t affine = 0;
  std::int64_t backward = 0;      ///< the caller's backward_pass; ranks may differ
  std::int64_t part_channels = 0; ///< channels that this rank would exchange at a time; ranks may differ
  std::array<char, 144> fault{};  ///< what is wrong on this rank; empty where nothing is
};
static_assert(sizeof(packet_header) == 256 && std::is_trivially_copyable_v<packet_header>);

template <std::size_t N>
void set_text(std::array<char, N>& field, std::string_view text) {
  field.fill('\0');
  std::ranges::copy(text.substr(0, N - 1), field.begin());
}

template <std::size_t N>
[[nodiscard]] std::string get_text(std::array<char, N> const& field) {
  return std::string{field.data(), ::strnlen(field.data(), N)};
}

[[nodiscard]] inline std::string to_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}
[[nodiscard]] inline std::string to_text(std::int64_t value) { return std::to_string(value); }
template <std::size_t N>
[[nodiscard]] std::string to_text(std::array<char, N> const& value) {
  return get_text(value);
}

/// Throws, the same on every rank, where a rank reported a fault or where two ranks disagree.
inline void require_agreement(std::span<packet_header const> ranks) {
  auto const pass = [&] { return get_text(ranks.front().pass); };
  std::string faults;
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].fault[0] != '\0')
      faults += (faults.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + ": " + get_text(ranks[r].fault);
  if (!faults.empty()) throw invalid_argument_error{pass() + ": " + faults};

  auto const require_same = [&](auto packet_header::*field, char const* name) {
    for (std::size_t r = 1; r < ranks.size(); ++r)
      if (ranks[r].*field != ranks[0].*field)
        throw mismatch_error{pass() + ": ranks disagree on " + name + ": rank 0 has " + to_text(ranks[0].*field) +
                             ", rank " + std::to_string(r) + " has " + to_text(ranks[r].*field)};
  };
  require_same(&packet_header::pass, "the operation");
  require_same(&packet_header::element, "the element type");
  require_same(&packet_header::channels, "the number of channels");
  require_same(&packet_header::eps, "eps");
  require_same(&packet_header::momentum, "momentum (-1: cumulative average)");
  require_same(&packet_header::running_variance,
               "the running variance (0: unbiased, 1: biased, 2: standard deviation)");
  require_same(&packet_header::tracks_running_statistics, "tracking running statistics");
  require_same(&packet_header::affine, "affine parameters");
}

} // namespace syncnorm::detail
