#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// What is known of contiguous channels, or of positions that are taken for channels, before they are mapped.
struct lanes_at_hand {
  bool folded; ///< positions are taken for channels
  bool follow; ///< a position begins where the one before it ends
  bool streamed;
  bool begin_lines; ///< where a line of the cache does, of what is streamed
  bool masked;
  bool foreseen; ///< by the processor, what is read next
  bool fetched;  ///< had better be
};

/// The runs in which a map takes such channels, lanes, of a box: several positions, one, or a part of each.
template <class T>
class lane_runs {
  using A = accumulate_t<T>;

public:
  lane_runs() = default;

  lane_runs(tensor_view<T const> const& x, lanes_at_hand const& is) : channels_{x.channels} {
    if (is.follow) {
      // From memory, a kilobyte or two of each coefficient stay in the cache even where what is read is fetched there.
      std::int64_t const most = is.streamed && !is.foreseen ? page_elements<T> / 4 : chunk_channels<A>;
      positions_ = std::clamp<std::int64_t>(most / std::max<std::int64_t>(1, channels_), 1,
                                            std::max<std::int64_t>(1, x.spatial));
    }
    bool const whole_lines = channels_ % line_elements<T> == 0 && is.begin_lines;
    joined_ = is.follow && is.streamed && !whole_lines && channels_ <= (is.masked ? chunk_channels<A> : widest_box<A>);
    if (joined_) positions_ = in_whole_lines<T>(positions_, channels_);
    narrow_boxes_ = is.folded && !is.streamed;
    // Where coefficients, and what counts, are more than the elements are, those of a part have to fit the first-level cache.
    if (positions_ == 1 && is.folded && is.masked)
      widest_part_ = chunk_channels<A>;
    else if (positions_ == 1 && sizeof(T) == 2)
      widest_part_ = 5 * chunk_channels<A> / 2;
    // Of more coefficients than these, fewer stay in the cache beside what is fetched.
    reads_ahead_ = is.streamed && is.fetched && (!is.folded || widest_part_ < channels_ || channels_ <= widest_box<A>);
  }

  /// Of a run.
  [[nodiscard]] std::int64_t positions() const { return positions_; }
  /// The length of the parts of so many channels that are mapped one after the other.
  [[nodiscard]] std::int64_t part_of(std::int64_t channels) const {
    return even_part(channels, widest_part_, line_elements<T>);
  }
  /// Lanes of which a run may read coefficients.
  [[nodiscard]] std::int64_t period() const { return channels_ * positions_ + (joined_ ? line_elements<T> : 0); }
  /// Whether boxes have no more channels than those whose coefficients fit the first-level cache.
  [[nodiscard]] bool narrow_boxes() const { return narrow_boxes_; }
  /// Whether what follows is fetched.
  [[nodiscard]] bool reads_ahead() const { return reads_ahead_; }

  struct range {
    std::int64_t begin, end;
  };
  /// Lanes [first, last) of each of so many positions from `position` of a box on, all where these are several; perhaps none. They begin
  /// and end where the next line of the cache does, except the box's first and last ones and those of positions that are not joined, as
  /// those of a box of some channels are not.
  /// `since_line()`: elements before the first of these, of the line that has it, or a negative number where no lines are streamed.
  template <class SinceLine>
  [[nodiscard, gnu::always_inline]] range operator()(boxes::box const& box, std::int64_t position,
                                                     std::int64_t positions, std::int64_t first, std::int64_t last,
                                                     SinceLine const& since_line) const {
    std::int64_t const left = box.position + box.positions - position;
    bool const joined = joined_ && box.channels == channels_;
    range lanes{first, (positions - 1) * box.channels + last};
    if (!joined && last - first == box.channels) return lanes;
    std::int64_t const since = since_line();
    if (since < 0) return lanes;
    auto const next_line = [&](std::int64_t lane) {
      return ceil_div(since + lane, line_elements<T>) * line_elements<T> - since;
    };
    if (first != 0 || (joined && position != box.position)) lanes.begin = next_line(lanes.begin);
    if (last != box.channels || (joined && positions != left))
      lanes.end = std::min(next_line(lanes.end), (joined ? left : positions) * box.channels);
    return lanes;
  }

private:
  std::int64_t channels_ = 0, positions_ = 1, widest_part_ = std::numeric_limits<std::int64_t>::max();
  bool joined_ = false; ///< positions, in lines of the cache that have a part of two
  bool narrow_boxes_ = false;
  bool reads_ahead_ = false;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
