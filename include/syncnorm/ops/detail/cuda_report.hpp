#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/core/error.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::cuda::detail {

/// What the kernels of failed passes tell the host, in memory that both see.
class pass_report {
public:
  explicit pass_report(int ranks)
      : ranks_{static_cast<std::size_t>(ranks)}, memory_{offset + ranks_ * sizeof(packet_header)} {
    std::memset(memory_.host(), 0, offset + ranks_ * sizeof(packet_header));
  }

  [[nodiscard]] fault_report on_device() const {
    auto* const at = memory_.device();
    return {reinterpret_cast<pass_fault*>(at), reinterpret_cast<packet_header*>(at + offset)};
  }

  /// Throws what the first pass that failed since the last call has left, alike on every rank; does not wait.
  void raise() {
    std::atomic_ref word{*reinterpret_cast<std::uint32_t*>(memory_.host())};
    auto const fault = static_cast<pass_fault>(word.load(std::memory_order_acquire));
    if (fault == pass_fault::none) return;
    std::vector<packet_header> headers(ranks_);
    std::memcpy(static_cast<void*>(headers.data()), memory_.host() + offset, ranks_ * sizeof(packet_header));
    std::memset(memory_.host() + offset, 0, ranks_ * sizeof(packet_header));
    word.store(0, std::memory_order_release);
    // A pass of this rank alone leaves one header.
    if (headers.size() > 1 && headers[1].pass[0] == '\0') headers.resize(1);
    bool const echo = std::ranges::all_of(headers, [](packet_header const& header) {
      return std::strcmp(header.fault.data(), "the forward pass failed") == 0;
    });
    if (echo && forward_was_told_) return;
    auto const pass = syncnorm::detail::get_text(headers.front().pass);
    forward_was_told_ = pass == "batch_norm forward";
    if (fault == pass_fault::one_value)
      throw invalid_argument_error{pass + ": training needs more than 1 value per channel over all ranks, got 1"};
    syncnorm::detail::require_agreement(headers);
  }

private:
  using packet_header = syncnorm::detail::packet_header;
  static constexpr std::size_t offset = 64;

  std::size_t ranks_;
  mapped_memory memory_;
  bool forward_was_told_ = false; // so that the backward pass after it says nothing else
};

} // namespace syncnorm::cuda::detail
