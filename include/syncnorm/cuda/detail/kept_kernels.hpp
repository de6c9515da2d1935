#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/operands.hpp>

// What a pass in place keeps of x: which channels, and their elements.
namespace syncnorm::cuda::detail {

struct choose_arguments {
  affine_values affine;
  std::int64_t channels;
  double negative_slope, ratio; ///< as `is_recoverable` takes them
  kept_channels kept;
};

/// Lists the channels that cannot be recovered, in order, by one block.
template <int Threads, class Hw>
SYNCNORM_DEVICE void choose_kernel(Hw const& hw, choose_arguments const& a) {
  struct storage {
    std::int64_t counts[Threads];
  };
  auto& shared = hw.template shared<storage>();
  std::int64_t const per_thread = (a.channels + Threads - 1) / Threads, first = hw.thread() * per_thread;
  std::int64_t const last = first + per_thread < a.channels ? first + per_thread : a.channels;
  auto const is_kept = [&](std::int64_t c) {
    return !is_recoverable(load_value(hw, a.affine.gamma, c, 1), load_value(hw, a.affine.beta, c, 0), a.negative_slope,
                           a.ratio);
  };
  std::int64_t own = 0;
  for (std::int64_t c = first; c < last; ++c) own += is_kept(c) ? 1 : 0;
  hw.store(&shared.counts[hw.thread()], own);
  hw.barrier();
  std::int64_t all = 0, slot = 0;
  for (int t = 0; t < Threads; ++t) {
    std::int64_t const count = hw.load(&shared.counts[t]);
    all += count;
    slot += t < hw.thread() ? count : 0;
  }
  bool const fits = all <= a.kept.room;
  for (std::int64_t c = first; c < last && fits; ++c)
    if (is_kept(c)) hw.store(a.kept.list + slot++, static_cast<std::int32_t>(c));
  if (hw.thread() != 0) return;
  hw.store(a.kept.state, fits ? all : std::int64_t{-1});
  hw.store(a.kept.state + 1, std::int64_t{0});
}

/// `Word` is an unsigned integer of the size of an element.
template <class Word>
struct copy_arguments {
  tensor_view<Word> x;
  kept_channels kept;
  std::int64_t const* saved_count; ///< null: to what is kept; else back to x, unless it is negative or x is there
};

/// The loop of `copy_kernel`, by indices that hold all that it counts: 32 bits divide several times as fast as 64.
template <class Index, class Word, class Hw>
SYNCNORM_DEVICE void copy_elements(Hw const& hw, copy_arguments<Word> const& a, Index listed, Index count, Index step) {
  bool const back = a.saved_count != nullptr, by_channels = a.kept.by_channels;
  auto* const elements = static_cast<Word*>(a.kept.elements);
  Index const threads = static_cast<Index>(hw.threads()), spatial = static_cast<Index>(a.x.spatial);
  for (Index i = hw.block() * threads + static_cast<Index>(hw.thread()); i < listed * count; i += step) {
    Index const slot = by_channels ? i % listed : i / count, at = by_channels ? i / listed : i % count;
    auto const n = static_cast<std::int64_t>(at / spatial), s = static_cast<std::int64_t>(at % spatial);
    Word* const element = a.x.data + (n * a.x.stride_n + hw.load(a.kept.list + slot) * a.x.stride_c + s * a.x.stride_s);
    if (back)
      hw.store(element, hw.load(static_cast<Word const*>(elements + i)));
    else
      hw.store(elements + i, hw.load(static_cast<Word const*>(element)));
  }
}

/// Copies the listed channels of x to what is kept, or back, whatever the strides of x are then.
template <class Word, class Hw>
SYNCNORM_DEVICE void copy_kernel(Hw const& hw, copy_arguments<Word> const& a) {
  bool const back = a.saved_count != nullptr;
  if (back && (hw.load(a.saved_count) < 0 || (a.kept.once && hw.load(a.kept.state + 1) != 0))) return;
  std::int64_t const listed = hw.load(a.kept.state), count = a.x.samples * a.x.spatial;
  std::int64_t const step = static_cast<std::int64_t>(hw.blocks()) * hw.threads();
  if (listed <= 0) return;
  if (listed * count + step < std::int64_t{1} << 32)
    copy_elements(hw, a, static_cast<std::uint32_t>(listed), static_cast<std::uint32_t>(count),
                  static_cast<std::uint32_t>(step));
  else
    copy_elements(hw, a, static_cast<std::uint64_t>(listed), static_cast<std::uint64_t>(count),
                  static_cast<std::uint64_t>(step));
}

} // namespace syncnorm::cuda::detail
