#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_side_stream.hpp>

namespace syncnorm::cuda::detail {

/// What the passes of one or several layers exchange together, `values` numbers a channel, in device memory: of each rank the headers
/// of all layers, and then their values, each layer's with a 1 behind them, which in sums is the number of ranks.
class pass_packets {
public:
  pass_packets() = default;
  /// `gathers`: ranks may gather them, for which there has to be room; else they reduce.
  pass_packets(std::span<std::int64_t const> channels, int values, int ranks, bool gathers)
      : values_{static_cast<std::size_t>(values)}, ranks_{static_cast<std::size_t>(ranks)}, gathers_{gathers},
        bytes_{header_bytes * channels.size()} {
    for (std::size_t l = 0; l < channels.size(); ++l) {
      layers_.push_back({channels[l] > 0 ? channels[l] : 0, bytes_ - l * header_bytes, weights_});
      bytes_ += packet_bytes(channels[l], values) - header_bytes + sizeof(double);
      weights_ += static_cast<std::size_t>(layers_[l].channels) + 2;
    }
    memory_cutter sizes;
    cut(sizes);
    memory_ = device_memory{sizes.used()};
    memory_cutter cutter{memory_.data()};
    cut(cutter);
  }

  [[nodiscard]] bool empty() const noexcept { return bytes_ == 0; }
  [[nodiscard]] std::size_t layers() const noexcept { return layers_.size(); }
  [[nodiscard]] std::size_t values() const noexcept { return values_; }
  [[nodiscard]] bool gathers() const noexcept { return gathers_; }

  [[nodiscard]] std::span<std::byte> own() const { return {own_, bytes_}; }
  /// Where a layer's packet is made, which ranks gather or `reduce`; `moments`: what they reduce.
  [[nodiscard]] packet_place place(std::size_t layer, bool reduce, bool moments) const {
    auto at = place_in(own_, layer);
    at.awaited = {(reduce ? headers_ : all_) + layer * header_bytes, static_cast<int>(ranks_),
                  reduce ? header_bytes * layers() : bytes_};
    if (reduce && moments) {
      at.weighted = weighted_ + layers_[layer].weighted_at;
      at.arrival = at.weighted + layers_[layer].channels + 1;
    } else if (reduce) {
      at.awaited.arrivals = place_in(merged_, layer).arrival;
    }
    return at;
  }
  /// Of micro-batches of a layer, 0 or 1.
  [[nodiscard]] std::byte* scratch(std::size_t i) const { return scratch_ + i * bytes_; }

  /// Of all ranks, where they gather.
  [[nodiscard]] std::span<std::byte> all() const { return {all_, gathers_ ? bytes_ * ranks_ : 0}; }
  [[nodiscard]] gathered_packets gathered(std::size_t layer) const {
    return {all_ + layer * header_bytes, static_cast<int>(ranks_), bytes_, layers_[layer].values_at};
  }

  /// What ranks that reduce gather, and what they sum up: the values, of moments first `weighted` and then each layer's m2.
  [[nodiscard]] std::span<std::byte> own_headers() const { return own().first(header_bytes * layers()); }
  [[nodiscard]] std::span<std::byte> all_headers() const { return {headers_, header_bytes * layers() * ranks_}; }
  [[nodiscard]] std::span<double> own_values() const { return values_in(own_); }
  [[nodiscard]] std::span<double> merged_values() const { return values_in(merged_); }
  [[nodiscard]] std::span<double> weighted() const { return {weighted_, weights_}; }
  [[nodiscard]] std::span<double> merged_m2(std::size_t layer) const {
    auto const channels = static_cast<std::size_t>(layers_[layer].channels);
    return {place_in(merged_, layer).arrival - channels, channels + 1};
  }
  [[nodiscard]] gathered_packets merged(std::size_t layer) const {
    auto const at = place_in(merged_, layer);
    auto all = own_packet(at);
    all.arrivals = at.arrival;
    all.summed = static_cast<int>(ranks_);
    return all;
  }
  [[nodiscard]] reduced_packets reduced(std::size_t layer, bool moments) const {
    auto const merged = place_in(merged_, layer);
    auto const* const weighted = moments ? weighted_ + layers_[layer].weighted_at : nullptr;
    return {{headers_ + layer * header_bytes, static_cast<int>(ranks_), header_bytes * layers()},
            place_in(own_, layer),
            merged,
            weighted,
            moments ? weighted + layers_[layer].channels + 1 : merged.arrival,
            layers_[layer].channels};
  }

  /// The headers of all layers, gathered with the packets or, where ranks `reduce`, alone.
  [[nodiscard]] gathered_headers headers(bool reduce) const {
    auto const count = static_cast<int>(layers());
    if (reduce) return {headers_, merged_, static_cast<int>(ranks_), count, header_bytes * layers()};
    return {all_, all_, static_cast<int>(ranks_), count, bytes_};
  }

private:
  struct layer_place {
    std::int64_t channels;
    std::size_t values_at; ///< bytes from its header
    std::size_t weighted_at;
  };
  static constexpr std::size_t header_bytes = sizeof(syncnorm::detail::packet_header);

  void cut(memory_cutter& cutter) {
    own_ = cutter.take<std::byte>(bytes_);
    all_ = cutter.take<std::byte>(gathers_ ? bytes_ * ranks_ : 0);
    scratch_ = cutter.take<std::byte>(layers() == 1 ? 2 * bytes_ : 0);
    headers_ = cutter.take<std::byte>(header_bytes * layers() * ranks_);
    merged_ = cutter.take<std::byte>(bytes_);
    weighted_ = cutter.take<double>(weights_);
  }
  [[nodiscard]] packet_place place_in(std::byte* packets, std::size_t layer) const {
    packet_place at{packets + layer * header_bytes};
    at.values_at = layers_[layer].values_at;
    at.arrival = reinterpret_cast<double*>(at.data + at.values_at) +
                 static_cast<std::ptrdiff_t>(values_) * layers_[layer].channels;
    return at;
  }
  [[nodiscard]] std::span<double> values_in(std::byte* packets) const {
    auto const before = header_bytes * layers();
    return {reinterpret_cast<double*>(packets + before), (bytes_ - before) / sizeof(double)};
  }

  std::vector<layer_place> layers_;
  std::size_t values_ = 0, ranks_ = 0;
  bool gathers_ = false;
  std::size_t bytes_ = 0, weights_ = 0;
  device_memory memory_;
  std::byte *own_ = nullptr, *all_ = nullptr, *scratch_ = nullptr, *headers_ = nullptr, *merged_ = nullptr;
  double* weighted_ = nullptr;
};

/// Of passes in two phases: what they exchange, and the stream on which they do.
struct packet_buffers {
  packet_buffers(std::span<std::int64_t const> channels, int ranks, bool gathers)
      : packets{channels, 2, ranks, gathers} {}

  pass_packets packets;
  side_stream side;
  bool in_use = false;
  bool captured = false; ///< graphs have them, and may be replayed while other passes are pending
};

/// Buffers of the passes in two phases of some layers: as many as were ever pending at a time, in graphs and outside of them.
class packet_pool {
public:
  packet_pool(std::vector<std::int64_t> channels, int ranks) : channels_{std::move(channels)}, ranks_{ranks} {}

  [[nodiscard]] std::vector<std::int64_t> const& channels() const noexcept { return channels_; }

  /// Some that are not in use, for packets that are gathered or reduced.
  [[nodiscard]] packet_buffers& take(bool gathers, cudaStream_t stream) {
    bool const captures = is_capturing(stream);
    auto const find = [&](bool captured) {
      auto const found = std::ranges::find_if(buffers_, [&](packet_buffers const& each) {
        return !each.in_use && each.captured == captured && each.packets.gathers() == gathers;
      });
      return found == buffers_.end() ? nullptr : &*found;
    };
    auto* found = find(captures);
    if (found == nullptr && captures) found = find(false);
    if (found == nullptr && captures)
      throw invalid_argument_error{"begin: the stream is being captured in a graph before there is memory for as many "
                                   "pending passes: run such a step outside of a graph first"};
    if (found == nullptr) found = &buffers_.emplace_back(channels_, ranks_, gathers);
    found->captured = captures;
    return *found;
  }

private:
  std::vector<std::int64_t> channels_;
  int ranks_;
  std::deque<packet_buffers> buffers_; // stay where they are
};

} // namespace syncnorm::cuda::detail
