#pragma once

#include <algorithm>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Cuts `[N, C, S]` into boxes of about `box_elements`, of which every element belongs to one.
class boxes {
public:
  static constexpr std::int64_t box_elements = 1 << 17;

  struct box {
    std::int64_t channel, channels, sample, samples, position, positions;
  };

  /// `narrowest`: as many channels as there are belong to a box, up to this. `widest`: and no more.
  boxes(std::int64_t samples, std::int64_t channels, std::int64_t spatial, std::int64_t narrowest,
        std::int64_t widest = box_elements)
      : samples_{samples}, channels_{channels}, spatial_{spatial} {
    if (samples * channels * spatial == 0) return;
    std::int64_t const fitting = box_elements / std::min(spatial, box_elements) / 16 * 16;
    c_ = even_part(channels, std::clamp(fitting, narrowest, widest));
    s_ = c_ <= fitting ? spatial : even_part(spatial, std::max<std::int64_t>(16, box_elements / c_ / 16 * 16));
    n_ = std::clamp<std::int64_t>(box_elements / (c_ * s_), 1, samples);
    count_ = ceil_div(channels, c_) * ceil_div(spatial, s_) * ceil_div(samples, n_);
  }

  [[nodiscard]] std::int64_t count() const { return count_; }

  [[nodiscard]] box operator[](std::int64_t i) const {
    std::int64_t const over_s = ceil_div(spatial_, s_), over_c = ceil_div(channels_, c_);
    std::int64_t const s = i % over_s * s_, c = i / over_s % over_c * c_, n = i / over_s / over_c * n_;
    return {c, std::min(c_, channels_ - c), n, std::min(n_, samples_ - n), s, std::min(s_, spatial_ - s)};
  }

private:
  std::int64_t samples_, channels_, spatial_, n_ = 0, c_ = 0, s_ = 0, count_ = 0;
};

/// The most contiguous channels, or positions that are taken for channels, of which all belong to one box: their coefficients fit the
/// second-level cache, and a part of a position by itself takes longer than reading them there.
template <class A>
inline constexpr std::int64_t widest_box = 8 * chunk_channels<A>;

/// The boxes of a map of tensors like `x`; `parts`: with no more channels than those whose coefficients fit the first-level cache.
template <class A, class T>
[[nodiscard]] boxes boxes_of_map(tensor_view<T> const& x, layout of, bool parts) {
  constexpr std::int64_t chunk = chunk_channels<A>;
  if (parts) return {x.samples, x.channels, x.spatial, chunk, chunk};
  return {x.samples, x.channels, x.spatial, of == layout::channels ? widest_box<A> : 16};
}

/// Computes the boxes of a map, the last ones first: what was read last is the likeliest to be in the cache still. Where a processor
/// does not foresee what is read by itself, that costs more than it gains.
template <class Map>
void map_boxes(executor_ref exec, Map const& map, std::int64_t channels_ahead = 0) {
  boxes const tasks = map.tasks();
  bool const backwards = processor::here().foresees;
  exec.for_each(tasks.count(), [&](std::int64_t i) {
    map(tasks[backwards ? tasks.count() - 1 - i : i], channels_ahead);
    stream_fence();
  });
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
