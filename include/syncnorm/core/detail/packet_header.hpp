#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace syncnorm::detail {

/// How a pass is run, by which messages lie.
enum class pass_form : std::int16_t { one_phase, two_phases, in_group, in_group_alone };

/// What every rank says about itself at the head of an exchange, so that what is wrong on one rank only is known to all
/// before any of them acts on the statistics. What ranks have to agree on comes first, without gaps, so that a kernel
/// compares bytes.
struct packet_header {
  std::array<char, 24> pass{};    ///< the operation and its direction
  std::array<char, 16> element{}; ///< element_traits<T>::name
  std::int64_t channels = 0;
  double eps = 0;
  double momentum = 0;               ///< −1 − n: the cumulative average of n batches, 0 of a counter on a device
  std::int16_t running_variance = 0; ///< the option of this name
  std::int16_t normalize_by = 0;     ///< the same
  std::int32_t tracks_running_statistics = 0;
  std::int32_t affine = 0;
  std::int16_t policy = 0; ///< exchange_policy, resolved
  std::int16_t wish = 0;   ///< exchange_policy as the options have it
  std::int16_t layers = 1; ///< whose values travel together
  pass_form form = pass_form::one_phase;
  std::uint32_t shape = 0; ///< a digest of their channels
  // In what follows ranks may differ.
  std::int64_t count = 0;    ///< elements of a channel on this rank
  std::int32_t backward = 0; ///< the caller's backward_pass
  std::int32_t unused = 0;
  std::int64_t part_channels = 0; ///< channels that this rank would exchange at a time
  std::array<char, 144> fault{};  ///< what is wrong on this rank; empty where nothing is
};
static_assert(sizeof(packet_header) == 256 && std::is_trivially_copyable_v<packet_header>);

/// Bytes of a header in which ranks have to agree.
inline constexpr std::size_t agreed_bytes = offsetof(packet_header, count);
static_assert(agreed_bytes == 88);

/// The faults that kernels give packets.
inline constexpr char forward_pass_failed[] = "the forward pass failed",
                      no_room_to_keep[] = "more channels to keep than room";

/// What the fault of a header on a device begins with that another rank is to send, until it has come: a pass whose exchange is
/// aborted must not take that of the pass before for it.
inline constexpr std::array<char, 8> absent{'a', 'b', 's', 'e', 'n', 't'};

} // namespace syncnorm::detail
