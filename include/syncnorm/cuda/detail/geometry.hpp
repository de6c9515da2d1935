#pragma once

#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// Along which axis a pack lies: that of positions, or that of channels. Packs along an axis of another stride than 1 are
/// accessed element by element.
enum class axis : std::uint8_t { positions, channels };

/// Packs along channels that make up a line of the cache, 128 bytes; and that a block of a map takes side by side at most, so that a
/// warp reads 512 bytes.
inline constexpr int line_lanes = 8, most_map_lanes = 32;

/// How a launch cuts `[N, C, S]`: groups of channels, each cut into pieces, one to a block. A group is a channel by packs
/// along positions, and `lanes` packs by packs along channels. What is in a group comes in items: the packs of its rows,
/// of which there are `inner` in each of N; or its N·S positions.
struct geometry {
  std::int64_t samples = 0, channels = 0, spatial = 0; ///< of the tensors
  std::int64_t columns = 1;                    ///< channels of the tensors that are one of the layer; `take_columns`
  std::int64_t inner = 1;                      ///< items of a sample
  std::int64_t per_piece = 1;                  ///< items of a piece
  std::int64_t step_outer = 0, step_inner = 1; ///< by what the items of a thread are apart, of samples and within one
  std::uint32_t pieces = 1, groups = 0;
  int lanes = 1;
  int threads = 64; ///< of a block
  int unit = 0;     ///< bytes of an item that is no pack, but a unit of dense_rows.hpp; else 0
  /// Every pack is there in full, and one access of each tensor and of the mask. Along channels there is no mask, and one sample.
  bool whole = false;
  bool streamed = false; ///< whole packs of a map come through a pack_stream
  bool aligned = false;  ///< every pack is one access of each tensor, along positions perhaps in part

  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t items() const { return samples * inner; }
  /// Of packs along `Axis`.
  template <axis Axis>
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t channels_of_layer() const {
    return channel_of<Axis>(channels);
  }
  /// Of the layer, by that of the tensors.
  template <axis Axis>
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::int64_t channel_of(std::int64_t column) const {
    if (Axis == axis::positions || columns == 1) return column;
    return static_cast<std::uint32_t>(column) / static_cast<std::uint32_t>(columns);
  }
  /// Of the launch.
  [[nodiscard]] constexpr std::uint32_t blocks() const { return groups * pieces; }
};

/// Items [begin, end) of a group, which are piece number `piece` of `pieces`, each of another block.
struct part_of_group {
  std::uint32_t group, piece, pieces;
  std::int64_t begin, end;

  /// What a block has.
  [[nodiscard]] static SYNCNORM_HOST_DEVICE part_of_group of_block(geometry const& cut, std::uint32_t block) {
    return of(cut, block % cut.groups, block / cut.groups);
  }
  /// The same where the blocks of a group are a cluster, and follow each other.
  [[nodiscard]] static SYNCNORM_HOST_DEVICE part_of_group of_cluster(geometry const& cut, std::uint32_t block) {
    return of(cut, block / cut.pieces, block % cut.pieces);
  }

private:
  [[nodiscard]] static SYNCNORM_HOST_DEVICE part_of_group of(geometry const& cut, std::uint32_t group,
                                                             std::uint32_t piece) {
    std::int64_t const all = cut.items(), first = piece * cut.per_piece, begin = first < all ? first : all;
    return {group, piece, cut.pieces, begin, begin + cut.per_piece < all ? begin + cut.per_piece : all};
  }
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

/// The same of a pack of which `K` is known. Of whole ones extents and strides are narrow, and a product is one instruction.
template <axis Axis, known K, class T>
[[nodiscard]] SYNCNORM_DEVICE T* address(tensor_view<T> const& t, spot const& at) {
  if constexpr (K != known::whole) return address(t, at);
  auto const product = [](std::int64_t a, std::int64_t b) {
    return std::int64_t{static_cast<std::int32_t>(a)} * static_cast<std::int32_t>(b);
  };
  if constexpr (Axis == axis::channels) return t.data + (at.channel + product(at.position, t.stride_s));
  return t.data + (product(at.sample, t.stride_n) + product(at.channel, t.stride_c) + at.position);
}

/// Whether there is input i of an op; a residual, which comes last, may be missing.
template <class Op>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool has_input(Op const& op, int i) {
  return i < Op::needed_inputs || op.input(i).data != nullptr;
}

template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline std::int64_t step_of(tensor_view<T> const& t) {
  return Axis == axis::positions ? t.stride_s : t.stride_c;
}

/// The items of one thread in a part of a group. Packs along positions begin where those of `lead` are aligned.
template <axis Axis, class T>
class walk {
public:
  static constexpr bool unmasked = false; ///< no item has a mask

  SYNCNORM_DEVICE walk(geometry const& cut, tensor_view<T const> const& lead, part_of_group const& part, int thread,
                       int threads)
      : cut_{cut}, lead_{lead} {
    lane_ = Axis == axis::positions ? 0 : thread % cut.lanes;
    int const first = Axis == axis::positions ? thread : thread / cut.lanes;
    stride_ = Axis == axis::positions ? threads : threads / cut.lanes;
    channel_ = Axis == axis::positions ? static_cast<std::int64_t>(part.group)
                                       : (static_cast<std::int64_t>(part.group) * cut.lanes + lane_) * pack_length<T>;
    begin_ = part.begin;
    item_ = begin_ + first;
    end_ = part.end;
    if (channel_ >= cut.channels || first >= stride_) end_ = item_; // lanes may be no divisor of threads
    outer_ = item_ / cut.inner;
    inner_ = item_ - outer_ * cut.inner;
  }

  [[nodiscard]] SYNCNORM_DEVICE bool inside() const { return item_ < end_; }
  /// Whether the next `n` items are inside.
  [[nodiscard]] SYNCNORM_DEVICE bool inside(int n) const {
    return item_ + static_cast<std::int64_t>(n - 1) * stride_ < end_;
  }
  /// How the next packs are accessed: `whole` of them that are whole, else `aligned` that are aligned, else one. Along channels, one
  /// pack that is aligned is whole, and one way to access it takes fewer registers than two.
  [[nodiscard]] SYNCNORM_DEVICE known next(int whole, int aligned) const {
    if (!(Axis == axis::channels && whole == 1) && cut_.whole && inside(whole)) return known::whole;
    return cut_.aligned && within(aligned) ? known::aligned : known::nothing;
  }
  /// The channel of element 0 of every pack of this thread.
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t channel() const { return channel_; }
  /// The number of the next pack in its part, of all lanes.
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t number() const {
    return Axis == axis::positions ? item_ - begin_ : (item_ - begin_) * cut_.lanes + lane_;
  }

  /// The item's pack, which is empty outside.
  template <known K = known::nothing>
  [[nodiscard]] SYNCNORM_DEVICE spot here() const {
    if constexpr (K == known::whole && Axis == axis::channels) return {0, item_, channel_, {0, pack_length<T>}};
    spot at{outer_, inner_, channel_, {0, K == known::whole ? pack_length<T> : 0}};
    if constexpr (Axis == axis::positions) at.position *= pack_length<T>;
    if (K == known::whole || !inside()) return at;
    if constexpr (Axis == axis::positions) {
      if (!cut_.whole && lead_.stride_s == 1) at.position -= offset();
      at.part.first = at.position < 0 ? static_cast<int>(-at.position) : 0;
      at.part.last = limit(cut_.spatial - at.position);
    } else {
      at.part.last = limit(cut_.channels - channel_);
    }
    return at;
  }

  template <known K = known::nothing>
  SYNCNORM_DEVICE void advance() {
    item_ += stride_;
    if constexpr (K == known::whole && Axis == axis::channels) {
      inner_ += stride_;
      return;
    }
    if constexpr (K == known::whole) { // as `address`
      auto const low = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
      std::int32_t const inner = low(inner_) + low(cut_.step_inner) - low(cut_.inner);
      inner_ = inner >= 0 ? inner : inner + low(cut_.inner);
      outer_ = low(outer_) + low(cut_.step_outer) + (inner >= 0 ? 1 : 0);
      return;
    }
    outer_ += cut_.step_outer;
    inner_ += cut_.step_inner;
    if (inner_ >= cut_.inner) {
      inner_ -= cut_.inner;
      ++outer_;
    }
  }

private:
  /// By how many elements the pack in which a row begins comes before it; the last bits of an address are all that counts.
  [[nodiscard]] SYNCNORM_DEVICE int offset() const {
    auto const low = [](auto value) { return static_cast<std::uint32_t>(value); };
    std::uint32_t const elements = low(outer_) * low(lead_.stride_n) + low(channel_) * low(lead_.stride_c);
    std::uint32_t const row = low(reinterpret_cast<std::uintptr_t>(lead_.data)) + elements * low(sizeof(T));
    return static_cast<int>((row & 15u) / low(sizeof(T)));
  }
  /// Whether the 16 bytes of each of the next `n` packs are all memory of the tensors: those of a tensor's first pack and of its
  /// last one may not be. In its last row the last item or the one before is the last pack.
  [[nodiscard]] SYNCNORM_DEVICE bool within(int n) const {
    if (Axis == axis::channels || cut_.whole) return true;
    bool is_within = channel_ != 0 || item_ != 0;
    if (channel_ < cut_.channels - 1) return is_within;
    std::int64_t left = cut_.items() - 1 - item_;
    SYNCNORM_UNROLL
    for (int u = 0; u < n; ++u, left -= stride_) is_within = is_within && left != 0 && left != 1;
    return is_within;
  }
  [[nodiscard]] static SYNCNORM_DEVICE int limit(std::int64_t left) {
    return left >= pack_length<T> ? pack_length<T> : left > 0 ? static_cast<int>(left) : 0;
  }

  geometry const& cut_;
  tensor_view<T const> const& lead_;
  std::int64_t channel_, begin_, item_, end_, outer_, inner_;
  int stride_, lane_;
};

/// Whether a pack of `t` is one access.
template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_one_access(tensor_view<T> const& t, spot const& at) {
  return step_of<Axis>(t) == 1 && is_aligned(address(t, at));
}

/// The pack of `t` at a spot of which `K` is known, of which the elements that exist are read or written.
template <axis Axis, known K, class Hw, class T>
[[nodiscard]] SYNCNORM_DEVICE pack<std::remove_const_t<T>> load_at(Hw const& hw, tensor_view<T> const& t,
                                                                   spot const& at, cached use) {
  return load_pack<K>(hw, address<Axis, K>(t, at), step_of<Axis>(t), at.part, use);
}
template <axis Axis, known K, class Hw, class T>
SYNCNORM_DEVICE void store_at(Hw const& hw, tensor_view<T> const& t, spot const& at, pack<T> const& some, cached use) {
  store_pack<K>(hw, address<Axis, K>(t, at), step_of<Axis>(t), at.part, some, use);
}

[[nodiscard]] SYNCNORM_HOST_DEVICE inline std::uint8_t const* address(mask_view const& mask, spot const& at) {
  return mask.data + (at.sample * mask.stride_n + at.position * mask.stride_s);
}

template <int Bytes>
struct mask_word;
template <>
struct mask_word<1> {
  using type = std::uint32_t;
};
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

/// The bytes of a mask for a pack of `T`: one for each element along positions, one along channels.
template <axis Axis, class T>
using mask_word_t = typename mask_word<Axis == axis::positions ? pack_length<T> : 1>::type;

/// Whether the mask of a pack of `T`, if there is one, is one access.
template <axis Axis, class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_one_access(mask_view const& mask, spot const& at) {
  if (mask.data == nullptr || Axis == axis::channels) return true;
  return mask.stride_s == 1 && reinterpret_cast<std::uintptr_t>(address(mask, at)) % pack_length<T> == 0;
}

/// A bit for each element of the pack that exists.
template <class T, known K>
[[nodiscard]] SYNCNORM_DEVICE unsigned existing(spot const& at) {
  constexpr unsigned all = (1u << pack_length<T>)-1;
  if constexpr (K == known::whole) return all;
  if (at.part.last <= at.part.first) return 0;
  return ((1u << at.part.last) - 1) & ~((1u << at.part.first) - 1);
}

/// The bytes of the mask, which there is, for the elements of a pack that exist.
template <axis Axis, class T, known K, class Hw>
[[nodiscard]] SYNCNORM_DEVICE mask_word_t<Axis, T> load_mask(Hw const& hw, mask_view const& mask, spot const& at) {
  using word = mask_word_t<Axis, T>;
  std::uint8_t const* const bytes = address(mask, at);
  if constexpr (Axis == axis::channels) {
    return at.part.last > at.part.first ? hw.load(bytes) : word{0};
  } else if constexpr (K == known::whole && pack_length<T> > 1) {
    return hw.load(reinterpret_cast<word const*>(bytes));
  } else {
    word all = 0;
    SYNCNORM_UNROLL
    for (int e = 0; e < pack_length<T>; ++e)
      if (e >= at.part.first && e < at.part.last)
        all |= static_cast<word>(word{hw.load(bytes + e * mask.stride_s)} << 8 * e);
    return all;
  }
}

/// A bit for each element of those that `exist` that the mask counts.
template <axis Axis, class T>
[[nodiscard]] SYNCNORM_DEVICE unsigned counted(mask_word_t<Axis, T> of_mask, unsigned exist) {
  if constexpr (Axis == axis::channels) return of_mask != 0 ? exist : 0;
  unsigned bits = 0;
  SYNCNORM_UNROLL
  for (int e = 0; e < pack_length<T>; ++e) bits |= (of_mask >> 8 * e & 0xffu) != 0 ? 1u << e : 0;
  return bits & exist;
}

} // namespace syncnorm::cuda::detail
