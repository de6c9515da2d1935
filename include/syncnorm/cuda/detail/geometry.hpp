#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// Along which axis a pack lies: that of positions, or that of channels. Packs along an axis of another stride than 1 are
/// accessed element by element.
enum class axis : std::uint8_t { positions, channels };

/// How a launch cuts `[N, C, S]`: groups of channels, each cut into pieces, one to a block. A group is a channel by packs
/// along positions, and `lanes` packs by packs along channels. What is in a group comes in items: the packs of its rows,
/// of which there are `inner` in each of N; or its N·S positions.
struct geometry {
  std::int64_t samples = 0, channels = 0, spatial = 0;
  std::int64_t inner = 1;                      ///< items of a sample
  std::int64_t per_piece = 1;                  ///< items of a piece
  std::int64_t step_outer = 0, step_inner = 1; ///< by what the items of a thread are apart, of samples and within one
  std::uint32_t pieces = 1, groups = 0;
  int lanes = 1;
  int threads = 64;   ///< of a block
  bool whole = false; ///< every pack is there in full, and one access of each tensor

  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t items() const { return samples * inner; }
};

/// A pack: the sample, and the position and channel of its element 0.
struct spot {
  std::int64_t sample, position, channel;
  extent_of_pack part;
};

template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline T* address(tensor_view<T> const& t, spot const& at) {
  return t.data + (at.sample * t.stride_n + at.channel * t.stride_c + at.position * t.stride_s);
}

template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline std::int64_t step_of(tensor_view<T> const& t) {
  return Axis == axis::positions ? t.stride_s : t.stride_c;
}

/// The items of one thread in one piece. Packs along positions begin where those of `lead` are aligned.
template <axis Axis, class T>
class walk {
public:
  SYNCNORM_DEVICE walk(geometry const& cut, tensor_view<T const> const& lead, std::uint32_t group, std::uint32_t piece,
                       int thread, int threads)
      : cut_{cut}, lead_{lead} {
    int const lane = Axis == axis::positions ? 0 : thread % cut.lanes;
    int const first = Axis == axis::positions ? thread : thread / cut.lanes;
    stride_ = Axis == axis::positions ? threads : threads / cut.lanes;
    channel_ = Axis == axis::positions ? static_cast<std::int64_t>(group)
                                       : (static_cast<std::int64_t>(group) * cut.lanes + lane) * pack_length<T>;
    std::int64_t const begin = piece * cut.per_piece, all = cut.items();
    item_ = begin + first;
    end_ = begin + cut.per_piece < all ? begin + cut.per_piece : all;
    if (channel_ >= cut.channels) end_ = item_;
    outer_ = item_ / cut.inner;
    inner_ = item_ - outer_ * cut.inner;
  }

  [[nodiscard]] SYNCNORM_DEVICE bool inside() const { return item_ < end_; }
  /// Whether the next `n` items are inside.
  [[nodiscard]] SYNCNORM_DEVICE bool inside(int n) const {
    return item_ + static_cast<std::int64_t>(n - 1) * stride_ < end_;
  }
  /// Whether every pack of the launch is whole, which is not looked at along channels: there are no registers left for it.
  [[nodiscard]] SYNCNORM_DEVICE bool all_whole() const { return Axis == axis::positions && cut_.whole; }
  /// The channel of element 0 of every pack of this thread.
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t channel() const { return channel_; }
  /// The number of the item in its group.
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t item() const { return item_; }

  /// The item's pack, which is empty outside. `Whole`: it is inside, and there in full.
  template <bool Whole = false>
  [[nodiscard]] SYNCNORM_DEVICE spot here() const {
    spot at{outer_, inner_, channel_, {0, 0}};
    if (!(Whole && Axis == axis::positions) && !inside()) return at;
    if constexpr (Axis == axis::positions) {
      at.position *= pack_length<T>;
      if (!cut_.whole && lead_.stride_s == 1) {
        T const* const row = lead_.data + (outer_ * lead_.stride_n + channel_ * lead_.stride_c);
        at.position -= static_cast<std::int64_t>((reinterpret_cast<std::uintptr_t>(row) & 15) / sizeof(T));
      }
      at.part.first = at.position < 0 ? static_cast<int>(-at.position) : 0;
      at.part.last = limit(cut_.spatial - at.position);
    } else {
      at.part.last = limit(cut_.channels - channel_);
    }
    return at;
  }

  SYNCNORM_DEVICE void advance() {
    item_ += stride_;
    outer_ += cut_.step_outer;
    inner_ += cut_.step_inner;
    if (inner_ >= cut_.inner) {
      inner_ -= cut_.inner;
      ++outer_;
    }
  }

private:
  [[nodiscard]] static SYNCNORM_DEVICE int limit(std::int64_t left) {
    return left >= pack_length<T> ? pack_length<T> : left > 0 ? static_cast<int>(left) : 0;
  }

  geometry const& cut_;
  tensor_view<T const> const& lead_;
  std::int64_t channel_, item_, end_, outer_, inner_;
  int stride_;
};

/// Whether a pack of `t` is one access.
template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_whole(tensor_view<T> const& t, spot const& at) {
  return step_of<Axis>(t) == 1 && is_aligned(address(t, at));
}

[[nodiscard]] SYNCNORM_HOST_DEVICE inline std::uint8_t const* address(mask_view const& mask, spot const& at) {
  return mask.data + (at.sample * mask.stride_n + at.position * mask.stride_s);
}

/// Whether the mask of a pack of `T`, if there is one, is one access.
template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_whole_mask(mask_view const& mask, spot const& at) {
  if (mask.data == nullptr || Axis == axis::channels) return true;
  return mask.stride_s == 1 && reinterpret_cast<std::uintptr_t>(address(mask, at)) % pack_length<T> == 0;
}

template <int Bytes>
struct mask_word;
template <>
struct mask_word<2> {
  using type = std::uint16_t;
};
template <>
struct mask_word<4> {
  using type = std::uint32_t;
};
template <>
struct mask_word<8> {
  using type = std::uint64_t;
};

/// A bit for each element of the pack that exists, and that `mask` counts. `Whole`: all exist, and the mask is one access.
template <axis Axis, class T, bool Whole, class Hw>
[[nodiscard]] SYNCNORM_DEVICE unsigned counted(Hw const& hw, mask_view const& mask, spot const& at) {
  constexpr int length = pack_length<T>;
  unsigned const all = Whole                           ? (1u << length) - 1
                       : at.part.last <= at.part.first ? 0
                                                       : ((1u << at.part.last) - 1) & ~((1u << at.part.first) - 1);
  if (mask.data == nullptr || all == 0) return all;
  std::uint8_t const* const bytes = address(mask, at);
  if constexpr (Axis == axis::channels) return hw.load(bytes) != 0 ? all : 0;
  unsigned bits = 0;
  if constexpr (Whole) {
    using word = typename mask_word<length>::type;
    word const of_mask = hw.load(reinterpret_cast<word const*>(bytes));
    SYNCNORM_UNROLL
    for (int e = 0; e < length; ++e) bits |= (of_mask >> 8 * e & 0xffu) != 0 ? 1u << e : 0;
  } else {
    SYNCNORM_UNROLL
    for (int e = 0; e < length; ++e)
      if ((all >> e & 1u) != 0 && hw.load(bytes + e * mask.stride_s) != 0) bits |= 1u << e;
  }
  return bits;
}

} // namespace syncnorm::cuda::detail
