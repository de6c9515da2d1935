#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/core/packet_header.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_side_stream.hpp>

namespace syncnorm::cuda::detail {

/// What the passes of one kind of a layer exchange, `values` numbers a channel, in device memory.
class pass_packets {
public:
  pass_packets() = default;
  /// `gathers`: there may be passes that gather the packets of all ranks, for which there has to be room.
  pass_packets(std::int64_t channels, int values, int ranks, bool gathers)
      : channels_{channels > 0 ? channels : 0}, values_{static_cast<std::size_t>(values)},
        ranks_{static_cast<std::size_t>(ranks)}, gathers_{gathers}, bytes_{packet_bytes(channels, values)} {
    memory_cutter sizes;
    cut(sizes);
    memory_ = device_memory{sizes.used()};
    memory_cutter cutter{memory_.data()};
    cut(cutter);
  }

  [[nodiscard]] bool empty() const noexcept { return bytes_ == 0; }
  [[nodiscard]] std::size_t values() const noexcept { return values_; }
  [[nodiscard]] std::span<std::byte> own() const { return {own_, bytes_}; }
  /// Of micro-batches, 0 or 1.
  [[nodiscard]] std::byte* scratch(std::size_t i) const { return scratch_ + i * bytes_; }
  /// Of all ranks, where they gather.
  [[nodiscard]] std::span<std::byte> all() const { return {all_, gathers_ ? bytes_ * ranks_ : 0}; }
  [[nodiscard]] gathered_packets gathered() const { return {all_, static_cast<int>(ranks_)}; }

  /// What ranks that reduce gather, and what they sum up: the values, of moments first `weighted`.
  [[nodiscard]] std::span<std::byte> headers() const { return {headers_, header_bytes * ranks_}; }
  [[nodiscard]] std::span<std::byte> own_header() const { return own().first(header_bytes); }
  [[nodiscard]] std::span<double> own_values() const { return values_of(own_); }
  [[nodiscard]] std::span<double> merged_values() const { return values_of(merged_); }
  [[nodiscard]] std::span<double> weighted() const { return {weighted_, static_cast<std::size_t>(channels_) + 1}; }
  [[nodiscard]] gathered_packets merged() const { return own_packet({merged_}); }
  [[nodiscard]] reduced_packets reduced(bool moments) const {
    return {headers_, static_cast<int>(ranks_), own_, merged_, moments ? weighted_ : nullptr, channels_};
  }

private:
  static constexpr std::size_t header_bytes = sizeof(syncnorm::detail::packet_header);

  void cut(memory_cutter& cutter) {
    own_ = cutter.take<std::byte>(bytes_);
    all_ = cutter.take<std::byte>(gathers_ ? bytes_ * ranks_ : 0);
    scratch_ = cutter.take<std::byte>(bytes_ * 2);
    headers_ = cutter.take<std::byte>(header_bytes * ranks_);
    merged_ = cutter.take<std::byte>(bytes_);
    weighted_ = cutter.take<double>(static_cast<std::size_t>(channels_) + 1);
  }
  [[nodiscard]] std::span<double> values_of(std::byte* packet) const {
    return {reinterpret_cast<double*>(packet + header_bytes), values_ * static_cast<std::size_t>(channels_)};
  }

  std::int64_t channels_ = 0;
  std::size_t values_ = 0, ranks_ = 0;
  bool gathers_ = false;
  std::size_t bytes_ = 0;
  device_memory memory_;
  std::byte *own_ = nullptr, *all_ = nullptr, *scratch_ = nullptr, *headers_ = nullptr, *merged_ = nullptr;
  double* weighted_ = nullptr;
};

/// What the passes of some layers exchange together, in device memory: of each rank the headers of all, and then their values.
class packet_buffers {
public:
  packet_buffers(std::span<std::int64_t const> channels, int ranks)
      : ranks_{ranks}, bytes_{channels.size() * sizeof(syncnorm::detail::packet_header)} {
    for (std::size_t l = 0; l < channels.size(); ++l) {
      values_at_.push_back(bytes_ - l * sizeof(syncnorm::detail::packet_header));
      bytes_ += packet_bytes(channels[l]) - sizeof(syncnorm::detail::packet_header);
    }
    memory_ = device_memory{bytes_ * static_cast<std::size_t>(1 + ranks)};
  }

  [[nodiscard]] std::span<std::byte> own() const { return {memory_.data(), bytes_}; }
  [[nodiscard]] std::span<std::byte> all() const {
    return {memory_.data() + bytes_, bytes_ * static_cast<std::size_t>(ranks_)};
  }
  /// Where a layer's packet is made.
  [[nodiscard]] packet_place place(std::size_t layer) const {
    packet_place at{own().data() + layer * sizeof(syncnorm::detail::packet_header)};
    at.values_at = values_at_[layer];
    return at;
  }
  [[nodiscard]] gathered_packets gathered(std::size_t layer) const {
    return {all().data() + layer * sizeof(syncnorm::detail::packet_header), ranks_, bytes_, values_at_[layer]};
  }
  [[nodiscard]] gathered_headers headers() const {
    return {all().data(), ranks_, static_cast<int>(values_at_.size()), bytes_};
  }
  [[nodiscard]] side_stream& side() { return side_; }

  bool in_use = false;

private:
  int ranks_;
  std::size_t bytes_;
  std::vector<std::size_t> values_at_;
  device_memory memory_;
  side_stream side_;
};

/// Buffers of the passes in two phases of some layers: as many as were ever pending at a time.
class packet_pool {
public:
  packet_pool(std::vector<std::int64_t> channels, int ranks) : channels_{std::move(channels)}, ranks_{ranks} {}

  [[nodiscard]] std::vector<std::int64_t> const& channels() const noexcept { return channels_; }

  /// Some that are not in use.
  [[nodiscard]] packet_buffers& take(cudaStream_t stream) {
    for (auto& each : buffers_)
      if (!each.in_use) return each;
    if (is_capturing(stream))
      throw invalid_argument_error{"begin: the stream is being captured in a graph before there is memory for as many "
                                   "pending passes: run such a step outside of a graph first"};
    return buffers_.emplace_back(channels_, ranks_);
  }

private:
  std::vector<std::int64_t> channels_;
  int ranks_;
  std::deque<packet_buffers> buffers_; // stay where they are
};

} // namespace syncnorm::cuda::detail
