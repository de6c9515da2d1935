#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

struct accept_arguments {
  reduced_packets of;
  fault_report report;
};

/// Makes the packet of all ranks out of sums: the first block its header, with a fault where one has a fault, they disagree, have
/// too few values or are not all among the sums, of which it leaves word, and nobody else; the others, of moments, the mean of all
/// ranks, and this rank's part of m2 about it, which is added up next and loses nothing however far the mean is from 0.
template <class Hw>
SYNCNORM_DEVICE void accept_kernel(Hw const& hw, accept_arguments const& a) {
  auto const& of = a.of;
  double const count = of.weighted != nullptr ? hw.load(of.weighted + of.channels) : 0;
  if (hw.block() == 0) {
    incoming_packets const all{of.headers, 0};
    bool const disagree = hw.barrier_or(all.disagree(hw));
    bool const lost = of.arrivals != nullptr && hw.load(of.arrivals) != static_cast<double>(of.headers.ranks);
    bool const wrong = disagree || lost || count == 1;
    if (wrong)
      all.tell(hw, a.report, disagree ? pass_fault::disagreement : lost ? pass_fault::lost : pass_fault::one_value);
    for (int i = hw.thread(); i < header_words; i += hw.threads()) {
      std::uint64_t word = all.word(hw, 0, i);
      if (i == count_word) word = wrong ? 0 : static_cast<std::uint64_t>(count);
      if (i == fault_word) word = wrong ? std::uint64_t{told_word} : 0;
      hw.store(reinterpret_cast<std::uint64_t*>(of.merged.data) + i, word);
    }
    if (of.weighted != nullptr && of.merged.arrival != nullptr && hw.thread() == 0) hw.store(of.merged.arrival, 1.0);
    return;
  }
  std::int64_t const c = static_cast<std::int64_t>(hw.block() - 1) * hw.threads() + hw.thread();
  if (of.weighted == nullptr || c >= of.channels) return;
  incoming_packets const own{own_packet(of.own), of.channels};
  moments<double> const part{own.count(hw, 0), own.value(hw, 0, 0, c), own.value(hw, 0, 1, c)};
  double const mean = count > 0 ? hw.load(of.weighted + c) / count : 0;
  double* const merged = values_of(of.merged);
  hw.store(merged + c, mean);
  hw.store(merged + of.channels + c, m2_about(part, mean, of.headers.ranks));
}

} // namespace syncnorm::cuda::detail
