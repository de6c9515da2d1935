#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

using syncnorm::detail::packet_header;

inline constexpr int header_words = static_cast<int>(sizeof(packet_header) / sizeof(std::uint64_t));
inline constexpr int agreed_words = static_cast<int>(syncnorm::detail::agreed_bytes / sizeof(std::uint64_t));
inline constexpr int count_word = static_cast<int>(offsetof(packet_header, count) / sizeof(std::uint64_t));
inline constexpr int fault_word = static_cast<int>(offsetof(packet_header, fault) / sizeof(std::uint64_t));
static_assert(offsetof(packet_header, count) % sizeof(std::uint64_t) == 0);
static_assert(offsetof(packet_header, backward) == 8 * (count_word + 1));
static_assert(offsetof(packet_header, fault) % sizeof(std::uint64_t) == 0);

inline constexpr auto absent_word = std::bit_cast<std::uint64_t>(syncnorm::detail::absent);
/// The fault of a header of what failed before: the fault itself is in the report by then, and nobody adds to that.
inline constexpr std::uint64_t told_word = 1;

/// A header as words, which is how kernels take, write and compare it.
struct header_image {
  std::uint64_t words[header_words];
};

/// What a rank sends. Where *failing is negative, a step before it has failed on the device, and `failed` is written over the beginning of
/// the header's fault.
struct outgoing_packet {
  header_image header;
  std::uint64_t failed[4];
  std::int64_t const* failing;
  packet_place to;
};

/// The doubles of a packet.
[[nodiscard]] SYNCNORM_DEVICE inline double* values_of(packet_place const& packet) {
  return reinterpret_cast<double*>(packet.data + packet.values_at);
}

/// Writes the header, by one thread; with `count` in it where `counts`. What is awaited gets a fault.
template <class Hw>
SYNCNORM_DEVICE void write_header(Hw const& hw, outgoing_packet const& packet, double count, bool counts) {
  auto* const words = reinterpret_cast<std::uint64_t*>(packet.to.data);
  bool const failed = packet.failing != nullptr && hw.load(packet.failing) < 0;
  for (int i = 0; i < header_words; ++i) {
    std::uint64_t word = packet.header.words[i];
    if (i == count_word && counts) word = static_cast<std::uint64_t>(count);
    if (failed && i >= fault_word && i < fault_word + 4) word = packet.failed[i - fault_word];
    hw.store(words + i, word);
  }
  auto const& awaited = packet.to.awaited;
  for (int rank = 0; rank < awaited.ranks; ++rank)
    hw.store(reinterpret_cast<std::uint64_t*>(awaited.data + static_cast<std::size_t>(rank) * awaited.stride) +
                 fault_word,
             std::uint64_t{absent_word});
  if (packet.to.arrival != nullptr) hw.store(packet.to.arrival, 1.0);
  if (awaited.arrivals != nullptr) hw.store(awaited.arrivals, 0.0);
}

/// The packets of all ranks as a kernel reads them; of several, `stride` is not 0.
class incoming_packets {
public:
  SYNCNORM_DEVICE incoming_packets(gathered_packets const& from, std::int64_t channels)
      : data_{from.data}, bytes_{from.stride}, values_at_{from.values_at}, channels_{channels}, ranks_{from.ranks},
        arrivals_{from.arrivals}, summed_{from.summed} {}

  [[nodiscard]] SYNCNORM_DEVICE int ranks() const { return ranks_; }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t count(Hw const& hw, int rank) const {
    return static_cast<std::int64_t>(hw.load(reinterpret_cast<std::uint64_t const*>(at(rank)) + count_word));
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE double value(Hw const& hw, int rank, int row, std::int64_t c) const {
    return hw.load(reinterpret_cast<double const*>(at(rank) + values_at_) + row * channels_ + c);
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE std::uint64_t word(Hw const& hw, int rank, int i) const {
    return hw.load(reinterpret_cast<std::uint64_t const*>(at(rank)) + i);
  }

  /// What a thread sees in the headers that it looks at.
  struct view_of_headers {
    bool wrong = false; ///< a rank has a fault or disagrees
    bool needed = false, impossible = false;
  };
  /// Looks at the headers, each thread at some words of them.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE view_of_headers look(Hw const& hw) const {
    view_of_headers seen;
    if (ranks_ == 1) { // which agrees with itself
      if (hw.thread() == 0) seen.wrong = (word(hw, 0, fault_word) & 0xffu) != 0 || lost(hw);
      return seen;
    }
    for (int i = hw.thread(); i < ranks_ * agreed_words; i += hw.threads())
      seen.wrong |= word(hw, i / agreed_words, i % agreed_words) != word(hw, 0, i % agreed_words);
    for (int rank = hw.thread(); rank < ranks_; rank += hw.threads()) {
      seen.wrong |= (word(hw, rank, fault_word) & 0xffu) != 0;
      auto const backward = static_cast<std::uint32_t>(word(hw, rank, count_word + 1));
      seen.needed |= backward == 1, seen.impossible |= backward == 2;
    }
    return seen;
  }
  /// Whether, by what this thread looked at, a rank has a fault or disagrees. A pass that one rank needs to be
  /// followed by a backward pass and another cannot is such a case. By all threads of a block.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool disagree(Hw const& hw, view_of_headers const& seen) const {
    if (ranks_ == 1) return seen.wrong;
    bool const some_need = hw.barrier_or(seen.needed), some_cannot = hw.barrier_or(seen.impossible);
    return seen.wrong || (some_need && some_cannot);
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool disagree(Hw const& hw) const {
    return disagree(hw, look(hw));
  }

  /// Whether this is a sum that is not of all ranks.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool lost(Hw const& hw) const {
    return arrivals_ != nullptr && hw.load(arrivals_) != static_cast<double>(summed_);
  }

  /// Leaves word, by one block, all threads of it; of a sum only where it has not come, as of all else there was word before.
  template <class Hw>
  SYNCNORM_DEVICE void tell(Hw const& hw, fault_report const& report, pass_fault fault) const {
    auto* const state = reinterpret_cast<std::uint32_t*>(report.fault);
    if (state == nullptr || hw.barrier_or(hw.thread() == 0 && hw.load(state) != 0)) return;
    if (arrivals_ != nullptr) {
      if (word(hw, 0, fault_word) == told_word || !lost(hw)) return;
      fault = pass_fault::lost;
    } else if (report.headers != nullptr && data_ != nullptr) {
      for (int i = hw.thread(); i < ranks_ * header_words; i += hw.threads())
        hw.store(reinterpret_cast<std::uint64_t*>(report.headers) + i, word(hw, i / header_words, i % header_words));
    }
    hw.fence_system();
    hw.barrier();
    if (hw.thread() == 0) hw.store(state, static_cast<std::uint32_t>(fault));
  }

private:
  [[nodiscard]] SYNCNORM_DEVICE std::byte const* at(int rank) const {
    return data_ + static_cast<std::size_t>(rank) * bytes_;
  }

  std::byte const* data_;
  std::size_t bytes_, values_at_;
  std::int64_t channels_;
  int ranks_;
  double const* arrivals_;
  int summed_;
};

} // namespace syncnorm::cuda::detail
