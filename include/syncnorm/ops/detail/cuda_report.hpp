#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::cuda::detail {

/// What the kernels of failed passes tell the host, in memory that both see.
class pass_report {
public:
  /// `layers`: whose packets travel together.
  explicit pass_report(int ranks, int layers = 1)
      : layers_{static_cast<std::size_t>(layers)}, headers_{static_cast<std::size_t>(ranks) * layers_},
        memory_{offset + headers_ * sizeof(packet_header)} {
    std::memset(memory_.host(), 0, offset + headers_ * sizeof(packet_header));
  }

  [[nodiscard]] fault_report on_device() const {
    auto* const at = memory_.device();
    return {reinterpret_cast<pass_fault*>(at), reinterpret_cast<packet_header*>(at + offset)};
  }

  /// What a pass has failed by is thrown by other means.
  void tell(bool of_forward) noexcept { forward_was_told_ = of_forward; }

  /// Throws what the first pass that failed since the last call has left, alike on every rank; does not wait.
  void raise() {
    std::atomic_ref word{*reinterpret_cast<std::uint32_t*>(memory_.host())};
    auto const fault = static_cast<pass_fault>(word.load(std::memory_order_acquire));
    if (fault == pass_fault::none) return;
    std::vector<packet_header> headers(headers_);
    std::memcpy(static_cast<void*>(headers.data()), memory_.host() + offset, headers_ * sizeof(packet_header));
    std::memset(memory_.host() + offset, 0, headers_ * sizeof(packet_header));
    word.store(0, std::memory_order_release);
    if (fault == pass_fault::no_room)
      throw invalid_argument_error{std::string{"batch_norm inference: "} + syncnorm::detail::no_room_to_keep};
    if (fault == pass_fault::lost)
      throw communicator_error{"exchange",
                               "sums have not come from all ranks: the communicator was aborted, or does not "
                               "deliver"};
    require_arrival(headers);
    // A pass of this rank alone leaves one header.
    if (headers.size() > 1 && headers[1].pass[0] == '\0') headers.resize(1);
    auto const of_forward = [](packet_header const& header) {
      return std::strcmp(header.fault.data(), syncnorm::detail::forward_pass_failed) == 0;
    };
    bool const echo = std::ranges::any_of(headers, of_forward) && std::ranges::all_of(headers, [&](auto const& header) {
                        bool const no_other =
                            header.fault[0] == '\0' || of_forward(header); // a layer of constant statistics has none
                        return no_other && header.pass == headers.front().pass;
                      });
    if (echo && forward_was_told_) return;
    auto const pass = syncnorm::detail::get_text(headers.front().pass);
    forward_was_told_ = pass == "batch_norm forward" || pass == "batch_norm inference";
    if (fault == pass_fault::one_value)
      throw invalid_argument_error{"batch_norm forward: " + syncnorm::detail::one_value_fault(true)};
    for (std::size_t l = 0; l < layers_; ++l) {
      std::vector<packet_header> of_layer;
      for (std::size_t i = l; i < headers.size(); i += layers_) of_layer.push_back(headers[i]);
      syncnorm::detail::require_agreement(of_layer, layers_ == 1 ? std::string{} : " of layer " + std::to_string(l));
    }
    throw mismatch_error{pass + ": ranks disagree, on what their headers do not tell"};
  }

private:
  using packet_header = syncnorm::detail::packet_header;
  static constexpr std::size_t offset = 64;

  /// Of what has not come no other field says anything.
  void require_arrival(std::vector<packet_header> const& headers) const {
    using syncnorm::detail::absent;
    for (std::size_t i = 0; i < headers.size(); ++i)
      if (std::equal(absent.begin(), absent.end(), headers[i].fault.begin()))
        throw communicator_error{"exchange", "nothing has come from rank " + std::to_string(i / layers_) +
                                                 ": the communicator was aborted, or does not deliver"};
  }

  std::size_t layers_, headers_;
  mapped_memory memory_;
  bool forward_was_told_ = false; // so that the backward pass after it says nothing else
};

} // namespace syncnorm::cuda::detail
