#pragma once

#include <cstddef>
#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

// What a block keeps in shared memory of the tensors that a pass reads: one array of packs after the other, of those tensors that there
// are. Copies in flight take no registers, so all of a block's are at a time.
namespace syncnorm::cuda::detail {

/// How many packs of a tensor a block keeps.
[[nodiscard]] SYNCNORM_HOST_DEVICE inline std::int64_t kept_packs_of(geometry const& cut) {
  return cut.unit == 0 ? cut.per_piece * cut.lanes : cut.per_piece * cut.unit / 16;
}

/// Bytes of dynamic shared memory by which a piece of a group stays on the chip.
template <class Op>
[[nodiscard]] std::int64_t kept_bytes(Op const& op, geometry const& cut) {
  std::int64_t inputs = 0;
  for (int i = 0; i < Op::inputs; ++i) inputs += has_input(op, i) ? 1 : 0;
  return kept_packs_of(cut) * inputs * 16;
}

template <class Sums>
class kept_packs {
public:
  using T = typename Sums::element_type;

  SYNCNORM_DEVICE kept_packs(std::byte* room, geometry const& cut)
      : room_{reinterpret_cast<T*>(room)}, packs_{kept_packs_of(cut)} {}

  /// Begins to fetch all packs of a thread, which finds there what it fetched once it has waited.
  template <axis Axis, class Hw>
  SYNCNORM_DEVICE void fetch(Hw const& hw, Sums const& sums, walk<Axis, T> items) const {
    constexpr int unroll = 4;
    while (items.inside()) {
      known const next = items.next(unroll, 1);
      if (next == known::whole) {
        SYNCNORM_UNROLL
        for (int u = 0; u < unroll; ++u) fetch_next<Axis, known::whole>(hw, sums, items);
      } else if (next == known::aligned) {
        fetch_next<Axis, known::aligned>(hw, sums, items);
      } else {
        fetch_next<Axis, known::nothing>(hw, sums, items);
      }
    }
  }
  /// The pack at `items`, which is that at `at`.
  template <axis Axis, known K, class Hw, class Items, int Inputs>
  SYNCNORM_DEVICE void load(Hw const& hw, Sums const& sums, Items const& items, spot const& at,
                            pack<T> (&in)[Inputs]) const {
    bool const exists = K == known::whole || at.part.last > at.part.first;
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i) {
      in[i] = pack<T>{};
      if (exists && has_input(sums, i))
        in[i] = hw.load_pack(static_cast<T const*>(place(items.number(), i)), cached::normally);
    }
  }
  /// Where pack number `number` of input i is.
  [[nodiscard]] SYNCNORM_DEVICE T* place(std::int64_t number, int i) const {
    return room_ + (i * packs_ + number) * pack_length<T>;
  }

private:
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void fetch_next(Hw const& hw, Sums const& sums, walk<Axis, T>& items) const {
    spot const at = items.template here<K>();
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i) {
      if (!has_input(sums, i)) continue;
      auto const& from = sums.input(i);
      T* const to = place(items.number(), i);
      if (K == known::whole || (K == known::aligned && at.part.template full<T>()))
        hw.template copy<16>(to, address<Axis, K>(from, at));
      else
        hw.store_pack(to, load_at<Axis, known::nothing>(hw, from, at, cached::normally), cached::normally);
    }
    items.template advance<K>();
  }

  T* room_;
  std::int64_t packs_;
};

/// The packs of one thread among those that are kept, where all elements from the first to the last count: what `walk` is, but for where
/// they are in the tensors.
template <class T>
class kept_walk {
public:
  static constexpr bool unmasked = true;

  SYNCNORM_DEVICE kept_walk(std::int64_t channel, std::int64_t elements, int thread, int threads)
      : channel_{channel}, number_{thread}, whole_{static_cast<int>(elements / pack_length<T>)},
        rest_{static_cast<int>(elements % pack_length<T>)}, stride_{threads} {}

  [[nodiscard]] SYNCNORM_DEVICE bool inside() const { return number_ < whole_ + (rest_ != 0 ? 1 : 0); }
  [[nodiscard]] SYNCNORM_DEVICE known next(int whole, int) const {
    return number_ + (whole - 1) * stride_ < whole_ ? known::whole : known::nothing;
  }
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t channel() const { return channel_; }
  [[nodiscard]] SYNCNORM_DEVICE std::int64_t number() const { return number_; }
  template <known K>
  [[nodiscard]] SYNCNORM_DEVICE spot here() const {
    return {0, 0, channel_, {0, K == known::whole || number_ < whole_ ? pack_length<T> : rest_}};
  }
  template <known>
  SYNCNORM_DEVICE void advance() {
    number_ += stride_;
  }

private:
  std::int64_t channel_;
  int number_, whole_, rest_, stride_;
};

} // namespace syncnorm::cuda::detail
