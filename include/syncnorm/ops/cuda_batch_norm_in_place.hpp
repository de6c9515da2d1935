#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>

namespace syncnorm::cuda {

/// What a forward pass in place keeps of x for its backward pass, on the current device: the channels that cannot be recovered
/// from y, as `is_recoverable` says. Which these are is known on the device alone, so there is room for a number of them.
template <class T>
class batch_norm_kept {
public:
  explicit batch_norm_kept(std::int64_t channels)
      : channels_{std::max<std::int64_t>(channels, 0)}, own_table_{table_bytes(channels_)}, table_{own_table_.data()} {}
  /// With room for `room` channels of an x of `count` elements a channel in `memory` of `bytes(channels, room, count)`, aligned to 16
  /// bytes, which it borrows.
  batch_norm_kept(std::int64_t channels, std::int64_t room, std::int64_t count, std::byte* memory)
      : channels_{std::max<std::int64_t>(channels, 0)}, room_{room}, count_{count}, table_{memory},
        elements_{memory + table_bytes(channels_)} {}
  [[nodiscard]] static std::size_t bytes(std::int64_t channels, std::int64_t room, std::int64_t count) {
    return table_bytes(std::max<std::int64_t>(channels, 0)) + static_cast<std::size_t>(room * count) * sizeof(T);
  }

  /// Makes room for the channels of an x of `count` elements a channel that cannot be recovered by these parameters, and for
  /// `spare` more. Local; waits for the stream, allocates, and drops what is kept.
  template <class P>
  void reserve(std::int64_t count, affine_parameters<P> affine, activation const& of, std::int64_t spare,
               cudaStream_t stream) {
    using syncnorm::detail::require_cuda;
    auto const on_host = [&](std::span<P const> values, double otherwise) {
      std::vector<P> all(static_cast<std::size_t>(channels_), from_double<P>(otherwise));
      if (!values.empty())
        require_cuda(cudaMemcpyAsync(all.data(), values.data(), values.size_bytes(), cudaMemcpyDeviceToHost, stream),
                     "cudaMemcpyAsync");
      require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      return all;
    };
    auto const gamma = on_host(affine.gamma, 1), beta = on_host(affine.beta, 0);
    std::int64_t needed = 0;
    for (std::size_t c = 0; c < gamma.size(); ++c)
      if (!is_recoverable(static_cast<double>(gamma[c]), static_cast<double>(beta[c]), of.negative_slope,
                          recoverable_ratio<T>))
        ++needed;
    room_ = count_ = 0;
    auto const room = std::min(channels_, needed + spare);
    own_elements_ = detail::device_memory{};
    own_elements_ = detail::device_memory{static_cast<std::size_t>(room * count) * sizeof(T)};
    elements_ = own_elements_.data();
    room_ = room, count_ = count;
  }
  /// Whether there is room for an x of `count` elements a channel, as far as the host knows.
  [[nodiscard]] bool suits(std::int64_t count, activation const& of) const {
    bool const none_is_recoverable = !is_recoverable(1, 0, of.negative_slope, recoverable_ratio<T>);
    return count <= count_ && (!none_is_recoverable || room_ == channels_);
  }

  [[nodiscard]] kept_channels memory() const {
    detail::memory_cutter cutter{table_};
    auto* const state = cutter.template take<std::int64_t>(1);
    auto* const list = cutter.template take<std::int32_t>(static_cast<std::size_t>(channels_));
    return {list, state, elements_, room_};
  }
  /// Channels that there is room for.
  [[nodiscard]] std::int64_t room() const noexcept { return room_; }
  /// Memory for elements that are kept.
  [[nodiscard]] std::size_t bytes() const noexcept { return static_cast<std::size_t>(room_ * count_) * sizeof(T); }

  tensor_view<T const> like{}; ///< the extents of the latest x
  bool holds_x = true;         ///< its memory, as far as passes have been enqueued

private:
  [[nodiscard]] static std::size_t table_bytes(std::int64_t channels) {
    detail::memory_cutter sizes;
    (void)sizes.take<std::int64_t>(1);
    (void)sizes.take<std::int32_t>(static_cast<std::size_t>(channels));
    return sizes.used();
  }

  std::int64_t channels_, room_ = 0, count_ = 0;
  detail::device_memory own_table_, own_elements_; // empty where they are borrowed
  std::byte *table_ = nullptr, *elements_ = nullptr;
};

} // namespace syncnorm::cuda
