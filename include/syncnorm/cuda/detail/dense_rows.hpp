#pragma once

#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/apply.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/kept_packs.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

// A channel whose rows lie in shared memory one after the other, without gaps, so that it is summed by packs wherever its rows begin in
// the tensors. There it is accessed by units, of as many bytes as all of its rows begin and end at a multiple of (`unit_of`), which are the
// items of a cut.
namespace syncnorm::cuda::detail {

/// Whether a reduction takes rows by units, which are then of 8 bytes: smaller ones take it longer than parts of packs.
template <class Op, axis Axis>
inline constexpr bool has_units = Axis == axis::positions && sizeof(typename Op::element_type) == 2 &&
                                  requires(Op const& op) {
  op.input(0);
};
inline constexpr int unit_of_reductions = 8;

/// f(bytes of a unit), as a constant.
template <class T, class F>
SYNCNORM_DEVICE void with_unit(int bytes, F const& f) {
  if (bytes == 16) return f(std::integral_constant<int, 16>{});
  if constexpr (sizeof(T) == 2)
    if (bytes == 8) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, static_cast<int>(sizeof(T))>{});
}

/// The units of one thread in a piece of a channel.
class unit_walk {
public:
  SYNCNORM_DEVICE unit_walk(geometry const& cut, part_of_group const& part, int thread, int threads)
      : of_row_{static_cast<int>(cut.inner)}, step_sample_{static_cast<int>(cut.step_outer)},
        step_unit_{static_cast<int>(cut.step_inner)}, stride_{threads}, end_{static_cast<int>(part.end - part.begin)},
        number_{thread} {
    auto const unit = static_cast<std::uint32_t>(part.begin) + static_cast<std::uint32_t>(thread);
    auto const of_row = static_cast<std::uint32_t>(of_row_);
    sample_ = static_cast<int>(unit / of_row);
    unit_ = static_cast<int>(unit % of_row);
  }

  /// Whether the next `n` units are inside.
  [[nodiscard]] SYNCNORM_DEVICE bool inside(int n) const { return number_ + (n - 1) * stride_ < end_; }
  /// The number of the next unit in its piece.
  [[nodiscard]] SYNCNORM_DEVICE int number() const { return number_; }
  /// Where it is in a tensor of which the channel begins at `channel`.
  template <int Length, class T>
  [[nodiscard]] SYNCNORM_DEVICE T* address(T* channel, std::int64_t stride_n) const {
    return channel + (std::int64_t{sample_} * static_cast<std::int32_t>(stride_n) + unit_ * Length);
  }
  SYNCNORM_DEVICE void advance() {
    number_ += stride_;
    sample_ += step_sample_;
    unit_ += step_unit_;
    if (unit_ < of_row_) return;
    unit_ -= of_row_;
    ++sample_;
  }

private:
  int of_row_, step_sample_, step_unit_, stride_, end_, number_, sample_, unit_;
};

template <class T>
[[nodiscard]] SYNCNORM_DEVICE T* channel_of(tensor_view<T> const& t, std::uint32_t channel) {
  return t.data + static_cast<std::int64_t>(channel) * t.stride_c;
}

/// Begins to fetch all units of a thread, of `Bytes`.
template <int Bytes, class Hw, class Sums>
SYNCNORM_DEVICE void fetch_units_of(Hw const& hw, Sums const& sums, kept_packs<Sums> const& kept,
                                    part_of_group const& part, unit_walk at) {
  using T = typename Sums::element_type;
  constexpr int length = Bytes / static_cast<int>(sizeof(T));
  constexpr int unroll = Bytes == 2 ? 8 / Sums::inputs : 4;
  auto const from = [&](unit_walk const& unit, int i) {
    auto const& t = sums.input(i);
    return unit.template address<length>(channel_of(t, part.group), t.stride_n);
  };
  auto const to = [&](unit_walk const& unit, int i) { return kept.place(0, i) + unit.number() * length; };
  auto const fetch = [&]<int Count>(std::integral_constant<int, Count>) {
    if constexpr (Bytes > 2) {
      SYNCNORM_UNROLL
      for (int u = 0; u < Count; ++u, at.advance()) {
        SYNCNORM_UNROLL
        for (int i = 0; i < Sums::inputs; ++i)
          if (has_input(sums, i)) hw.template copy<Bytes>(to(at, i), from(at, i));
      }
    } else { // which is too few for a copy
      pack<T, Bytes> some[Count][Sums::inputs]{};
      auto next = at;
      SYNCNORM_UNROLL
      for (int u = 0; u < Count; ++u, next.advance()) {
        SYNCNORM_UNROLL
        for (int i = 0; i < Sums::inputs; ++i)
          if (has_input(sums, i)) some[u][i] = hw.template load_pack<Bytes>(from(next, i), cached::normally);
      }
      SYNCNORM_UNROLL
      for (int u = 0; u < Count; ++u, at.advance()) {
        SYNCNORM_UNROLL
        for (int i = 0; i < Sums::inputs; ++i)
          if (has_input(sums, i)) hw.store_pack(to(at, i), some[u][i], cached::normally);
      }
    }
  };
  while (at.inside(unroll)) fetch(std::integral_constant<int, unroll>{});
  while (at.inside(1)) fetch(std::integral_constant<int, 1>{});
}

/// Begins to fetch all units of a thread.
template <class Hw, class Sums>
SYNCNORM_DEVICE void fetch_units(Hw const& hw, Sums const& sums, kept_packs<Sums> const& kept,
                                 part_of_group const& part, int unit, unit_walk const& at) {
  with_unit<typename Sums::element_type>(unit,
                                         [&](auto bytes) { fetch_units_of<bytes.value>(hw, sums, kept, part, at); });
}

/// Fetches all units of a block, and fills up the last pack. Returns the packs of a thread among those that are then there.
template <class Hw, class Sums>
[[nodiscard]] SYNCNORM_DEVICE kept_walk<typename Sums::element_type>
gather_units(Hw const& hw, Sums const& sums, kept_packs<Sums> const& kept, part_of_group const& part, int unit) {
  using T = typename Sums::element_type;
  std::int64_t const elements = (part.end - part.begin) * (unit / static_cast<int>(sizeof(T))),
                     rest = elements % pack_length<T>;
  if (rest != 0 && rest + hw.thread() < pack_length<T>) {
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i)
      if (has_input(sums, i)) hw.store(kept.place(0, i) + elements + hw.thread(), T{});
  }
  hw.wait_for_copies();
  hw.barrier();
  return {part.group, elements, hw.thread(), hw.threads()};
}

/// Maps the units of a thread, of `Bytes`, and writes them. Of a map that goes both ways, the forward one.
template <int Bytes, class Hw, class Sums, class Map>
SYNCNORM_DEVICE void map_units_of(Hw const& hw, Map const& map, kept_packs<Sums> const& kept, part_of_group const& part,
                                  unit_walk at, typename Map::A const (&k)[1][Map::coefficients]) {
  using T = typename Sums::element_type;
  constexpr int length = Bytes / static_cast<int>(sizeof(T));
  auto const put = [&]<int Count>(std::integral_constant<int, Count>) {
    pack<T, Bytes> in[Count][Map::inputs];
    auto next = at;
    SYNCNORM_UNROLL
    for (int u = 0; u < Count; ++u, next.advance()) {
      SYNCNORM_UNROLL
      for (int i = 0; i < Map::inputs; ++i) {
        in[u][i] = {};
        auto const& from = map.input(i);
        if (!has_input(map, i)) continue;
        in[u][i] = hw.template load_pack<Bytes>(
            i < Sums::inputs ? kept.place(0, i) + next.number() * length
                             : next.template address<length>(channel_of(from, part.group), from.stride_n),
            cached::normally);
      }
    }
    SYNCNORM_UNROLL
    for (int u = 0; u < Count; ++u, at.advance()) {
      pack<T, Bytes> out[Map::outputs];
      apply_to_pack<true>(map, k, in[u], ~0u, out);
      SYNCNORM_UNROLL
      for (int o = 0; o < Map::outputs; ++o) {
        auto const& to = map.output(o);
        if (to.data == nullptr) continue;
        hw.store_pack(at.template address<length>(channel_of(to, part.group), to.stride_n), out[o], map.use);
      }
    }
  };
  constexpr int unroll = Map::inputs == 1 ? 4 : 2;
  while (at.inside(unroll)) put(std::integral_constant<int, unroll>{});
  while (at.inside(1)) put(std::integral_constant<int, 1>{});
}

/// Maps the units of a thread, and writes them.
template <class Hw, class Sums, class Map>
SYNCNORM_DEVICE void map_units(Hw const& hw, Map const& map, kept_packs<Sums> const& kept, part_of_group const& part,
                               int unit, unit_walk const& at, typename Map::A const (&k)[1][Map::coefficients]) {
  with_unit<typename Map::element_type>(unit,
                                        [&](auto bytes) { map_units_of<bytes.value>(hw, map, kept, part, at, k); });
}

/// Bytes of dynamic shared memory of a block that takes rows by units.
template <class Op>
[[nodiscard]] int unit_bytes(Op const& op, geometry const& cut) {
  if constexpr (has_units<Op, axis::positions>)
    return cut.unit == 0 ? 0 : static_cast<int>(kept_bytes(op, cut));
  else
    return 0;
}

} // namespace syncnorm::cuda::detail
