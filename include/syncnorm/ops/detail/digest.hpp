#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::detail {

/// FNV-1a of the bytes of some values, in 64 bits.
class digest {
public:
  template <class T>
  void add(T const& value) {
    std::array<unsigned char, sizeof(T)> bytes;
    std::memcpy(bytes.data(), &value, sizeof(T));
    for (unsigned char const byte : bytes) state_ = (state_ ^ byte) * 0x100000001B3ULL;
  }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value + 0.0)); } // −0 is 0
  [[nodiscard]] std::uint64_t value() const noexcept { return state_; }

private:
  std::uint64_t state_ = 0xCBF29CE484222325ULL;
};

/// Of the channels of the layers whose values travel together.
[[nodiscard]] inline std::uint32_t shape_digest(std::span<std::int64_t const> channels) {
  digest all;
  for (auto const value : channels) all.add(value);
  return static_cast<std::uint32_t>(all.value() ^ (all.value() >> 32U));
}

/// What all headers of a rank say in the fields that ranks have to agree in.
[[nodiscard]] inline std::uint64_t agreement_digest(std::span<packet_header const> layers) {
  digest all;
  for (auto const& header : layers)
    for_each_agreed_field([&](auto packet_header::*field, char const*) { all.add(header.*field); });
  return all.value();
}

/// Shows by a sum over the ranks whether they all say the same and none has a fault. A digest is cut into pieces h of 16
/// bits; Σh = P·h and Σh² = P·h² for the h of every rank where and only where all are equal, and no rank finds both where
/// they are not. The sums are of integers, exact in any order for less than 2²⁰ ranks.
struct summed_agreement {
  static constexpr std::size_t size = 9; ///< the number of faults, then h and h² of four pieces

  static void write(std::span<packet_header const> layers, std::span<double, size> to) {
    auto const said = agreement_digest(layers);
    to[0] = 0;
    for (auto const& header : layers) to[0] += header.fault[0] != '\0' ? 1 : 0;
    for (std::size_t i = 0; i < 4; ++i) {
      auto const piece = static_cast<double>((said >> (16 * i)) & 0xFFFFU);
      to[1 + 2 * i] = piece;
      to[2 + 2 * i] = piece * piece;
    }
  }

  /// `sums` over the ranks of what each wrote, `own` what this one did.
  [[nodiscard]] static bool holds(std::span<double const, size> sums, std::span<double const, size> own, int ranks) {
    bool same = sums[0] == 0;
    for (std::size_t i = 1; i < size; ++i) same = same && sums[i] == ranks * own[i];
    return same;
  }
};

} // namespace syncnorm::detail
