#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

struct group_arguments {
  gathered_headers headers;
  bool forward; ///< one value per channel is too few
  fault_report report;
};

/// Where ranks disagree on a layer, or one has a fault or too few values, or its sums have not come, leaves word, and gives the packet
/// of every layer a fault, so that no layer's second kernel writes anything. By one block.
template <class Hw>
SYNCNORM_DEVICE void group_kernel(Hw const& hw, group_arguments const& a) {
  auto const& all = a.headers;
  auto const of_layer = [&](int layer) {
    return incoming_packets{{all.data + static_cast<std::size_t>(layer) * sizeof(packet_header), all.ranks, all.stride},
                            0};
  };
  auto const fault_of = [&](int layer) {
    return reinterpret_cast<std::uint64_t*>(all.faults) + layer * header_words + fault_word;
  };
  bool disagree = false, too_few = false, lost = false;
  for (int layer = 0; layer < all.layers; ++layer) {
    auto const packets = of_layer(layer);
    disagree |= packets.disagree(hw);
    std::int64_t count = 0;
    for (int rank = 0; rank < all.ranks; ++rank) count += packets.count(hw, rank);
    too_few |= a.forward && count == 1;
    lost |= hw.load(fault_of(layer)) == told_word;
  }
  disagree = hw.barrier_or(disagree);
  if (!disagree && !too_few && !lost) return; // these are the same in all threads
  auto* const state = reinterpret_cast<std::uint32_t*>(a.report.fault);
  bool const told = hw.barrier_or(hw.thread() == 0 && hw.load(state) != 0);
  auto* const to = reinterpret_cast<std::uint64_t*>(a.report.headers);
  int const words = to == nullptr ? 0 : all.ranks * all.layers * header_words;
  for (int i = hw.thread(); i < words && !told; i += hw.threads()) {
    int const header = i / header_words, layer = header % all.layers;
    hw.store(to + i, of_layer(layer).word(hw, header / all.layers, i % header_words));
  }
  hw.fence_system();
  hw.barrier();
  if (hw.thread() == 0 && !told)
    hw.store(state, static_cast<std::uint32_t>(disagree  ? pass_fault::disagreement
                                               : too_few ? pass_fault::one_value
                                                         : pass_fault::lost));
  for (int layer = hw.thread(); layer < all.layers; layer += hw.threads())
    hw.store(fault_of(layer), std::uint64_t{told_word});
}

} // namespace syncnorm::cuda::detail
