#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>

namespace syncnorm::cuda {

/// Whether channels of x are recovered through an activation at all, whatever gamma and beta are.
template <class T>
[[nodiscard]] bool has_inverse(activation const& of) {
  return is_recoverable(1, 0, recoverable_slope(of), recoverable_ratio<T>);
}

/// Waits for a stream, for ever.
inline constexpr auto wait_for_stream = [](cudaStream_t stream) {
  syncnorm::detail::require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
};

/// What a forward pass in place keeps of x for its backward pass, on the current device: the channels that cannot be recovered
/// from y, as `is_recoverable` says. Which these are is known on the device alone, so there is room for a number of them.
template <class T>
class batch_norm_kept {
public:
  /// Without room.
  explicit batch_norm_kept(std::int64_t channels) : channels_{std::max<std::int64_t>(channels, 0)} {}
  /// With room for `room` channels of an x like `of` in `memory` of `bytes(channels, room, of.count())`, aligned to 16 bytes, which it
  /// borrows.
  batch_norm_kept(std::int64_t channels, std::int64_t room, tensor_view<T const> of, std::byte* memory)
      : like{of}, channels_{std::max<std::int64_t>(channels, 0)}, room_{room}, count_{of.count()}, table_{memory},
        elements_{memory + table_bytes(channels_)} {
    like.data = nullptr;
  }
  [[nodiscard]] static std::size_t bytes(std::int64_t channels, std::int64_t room, std::int64_t count) {
    return table_bytes(std::max<std::int64_t>(channels, 0)) + static_cast<std::size_t>(room * count) * sizeof(T);
  }

  /// Makes room for the channels of an x of `count` elements a channel that cannot be recovered by these parameters, and for
  /// `spare` more. Local; waits for the stream, by `wait`, allocates, and drops what is kept. A graph goes on with the room that it was
  /// captured with, which stays as long as this.
  template <class P>
  void reserve(std::int64_t count, affine_parameters<P> affine, activation const& of, std::int64_t spare,
               cudaStream_t stream, function_ref<void(cudaStream_t)> wait = wait_for_stream) {
    using syncnorm::detail::require_cuda;
    wait(stream); // before there is a copy to wait for, which CUDA would do for ever
    auto const on_host = [&](std::span<P const> values, double otherwise) {
      std::vector<P> all(static_cast<std::size_t>(channels_), from_double<P>(otherwise));
      if (!values.empty())
        require_cuda(cudaMemcpyAsync(all.data(), values.data(), values.size_bytes(), cudaMemcpyDeviceToHost, stream),
                     "cudaMemcpyAsync");
      wait_for_stream(stream);
      return all;
    };
    auto const gamma = on_host(affine.gamma, 1), beta = on_host(affine.beta, 0);
    std::int64_t needed = 0;
    for (std::size_t c = 0; c < gamma.size(); ++c)
      if (!is_recoverable(as_double(gamma[c]), as_double(beta[c]), recoverable_slope(of), recoverable_ratio<T>))
        ++needed;
    room_ = count_ = 0;
    if (table_ == nullptr) table_ = (own_table_ = detail::device_memory{table_bytes(channels_)}).data();
    auto const room = std::clamp<std::int64_t>(needed + spare, 0, channels_);
    if (std::exchange(captured_, false)) elements_of_graphs_.push_back(std::move(own_elements_));
    own_elements_ = detail::device_memory{};
    own_elements_ = detail::device_memory{static_cast<std::size_t>(room * count) * sizeof(T)};
    elements_ = own_elements_.data();
    room_ = room, count_ = count;
  }
  /// Whether there is room for an x of `count` elements a channel, as far as the host knows.
  [[nodiscard]] bool suits(std::int64_t count, activation const& of) const {
    return count <= count_ && (has_inverse<T>(of) || room_ == channels_);
  }

  [[nodiscard]] kept_channels memory() const {
    detail::memory_cutter cutter{table_};
    auto* const state = cutter.template take<std::int64_t>(2);
    auto* const list = cutter.template take<std::int32_t>(static_cast<std::size_t>(channels_));
    return {list, state, elements_, room_, like.stride_c == 1 && like.stride_s != 1, !of_copies};
  }
  /// The same for a pass on the stream.
  [[nodiscard]] kept_channels memory(cudaStream_t stream) {
    captured_ = captured_ || detail::is_capturing(stream);
    return memory();
  }
  /// Channels that there is room for.
  [[nodiscard]] std::int64_t room() const noexcept { return room_; }
  /// Memory for elements that are kept.
  [[nodiscard]] std::size_t bytes() const noexcept { return static_cast<std::size_t>(room_ * count_) * sizeof(T); }

  tensor_view<T const> like{}; ///< the latest x, without its data
  bool of_copies = false;      ///< backward passes get a y each that is none of x yet

private:
  [[nodiscard]] static std::size_t table_bytes(std::int64_t channels) {
    detail::memory_cutter sizes;
    (void)sizes.take<std::int64_t>(2);
    (void)sizes.take<std::int32_t>(static_cast<std::size_t>(channels));
    return sizes.used();
  }

  std::int64_t channels_, room_ = 0, count_ = 0;
  detail::device_memory own_table_, own_elements_;        // empty where they are borrowed
  std::vector<detail::device_memory> elements_of_graphs_; // before there was other room
  bool captured_ = false;                                 // that a graph has elements_
  std::byte *table_ = nullptr, *elements_ = nullptr;
};

namespace detail {

/// What is kept of that one of K micro-batches which is the first to lack room: where it has enough, all have. Null: nothing is kept.
/// Those that keep every channel have room for it, and the others with elements keep the same channels. Epilogues: none, or K.
template <class T, class Epilogue>
[[nodiscard]] batch_norm_kept<T>* find_tightest(std::span<batch_norm_kept<T>> kept,
                                                std::span<Epilogue const> epilogues) {
  batch_norm_kept<T>* found = nullptr;
  bool found_inverse = false;
  for (std::size_t k = 0; k < kept.size(); ++k) {
    if (kept[k].like.size() == 0) continue;
    bool const inverse = has_inverse<T>(epilogues.empty() ? activation{} : epilogues[k].activation);
    if (found != nullptr && (inverse == found_inverse ? kept[k].room() >= found->room() : found_inverse)) continue;
    found = &kept[k], found_inverse = inverse;
  }
  return found;
}

} // namespace detail

} // namespace syncnorm::cuda
