#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/accumulator.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/map_kernel.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/detail/reduce_kernel.hpp>

namespace syncnorm::cuda::detail {

template <class Sums, class Map>
struct fused_arguments {
  geometry cut; ///< along positions, a piece to a group
  Sums sums;
  Map map;
  outgoing_packet packet; ///< its memory serves the report of a failure
};

/// Bytes of static shared memory of a fused kernel at most.
inline constexpr int fused_static_bytes = 2048;

/// Bytes of dynamic shared memory by which a channel stays on the chip.
template <class Sums>
[[nodiscard]] constexpr std::int64_t fused_bytes(geometry const& cut) {
  return cut.items() * Sums::inputs * 16;
}

/// The packs of a channel in shared memory: each thread finds there what it put there.
template <class Sums>
class kept_packs {
public:
  using T = typename Sums::element_type;

  SYNCNORM_DEVICE kept_packs(std::byte* room, std::int64_t items) : room_{reinterpret_cast<T*>(room)}, items_{items} {}

  template <class Hw>
  SYNCNORM_DEVICE void put(Hw const& hw, std::int64_t item, pack<T> const (&in)[Sums::inputs]) const {
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i) hw.store_pack(at(item, i), in[i], cached::normally);
  }
  template <int Inputs, class Hw>
  SYNCNORM_DEVICE void get(Hw const& hw, std::int64_t item, pack<T> (&in)[Inputs]) const {
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i) in[i] = hw.load_pack(static_cast<T const*>(at(item, i)), cached::normally);
  }

private:
  [[nodiscard]] SYNCNORM_DEVICE T* at(std::int64_t item, int i) const {
    return room_ + (i * items_ + item) * pack_length<T>;
  }

  T* room_;
  std::int64_t items_;
};

/// A pass of one rank alone over channels that fit into shared memory, a block to a channel: reads once and writes once.
template <class Sums, class Map, int Threads, class Hw>
SYNCNORM_DEVICE void fused_kernel(Hw const& hw, fused_arguments<Sums, Map> const& a) {
  using T = typename Sums::element_type;
  using A = typename Map::A;
  using reducer = reduction<Sums, axis::positions, Threads>;
  struct storage {
    typename reducer::storage sums;
    map_storage<Map, axis::positions> coefficients;
  };
  static_assert(sizeof(storage) <= fused_static_bytes);
  auto const& statistics = a.map.statistics;
  std::int64_t const channel = static_cast<std::int64_t>(hw.block());
  auto& shared = hw.template shared<storage>();
  kept_packs<Sums> const kept{hw.dynamic_shared(), a.cut.items()};
  walk<axis::positions, T> items{a.cut, a.sums.lead(), part_of_group::of_block(a.cut, hw.block()), hw.thread(),
                                 hw.threads()};

  channel_accumulator<Sums> sums{hw, a.sums, channel};
  auto reading = items;
  while (reading.inside()) {
    auto at = reading;
    take_batch(hw, a.sums, reading, [&](auto const& some) {
      SYNCNORM_UNROLL
      for (int u = 0; u < some.unroll; ++u) {
        if (at.inside()) kept.put(hw, at.item(), some.in[u]);
        at.advance();
      }
      sums.add(hw, some);
    });
  }
  double all[Sums::parts];
  sums.finish(all);
  // In flight while threads wait for each other.
  bool const failed_before = statistics.failed_before(hw);
  double const gamma = load_value(hw, statistics.affine.gamma, channel, 1),
               beta = load_value(hw, statistics.affine.beta, channel, 0);
  reducer::combine_block(hw, shared.sums, all);

  bool too_few = false;
  typename std::remove_cvref_t<decltype(statistics)>::summary of_channel{};
  if (hw.thread() == 0) {
    double value[Sums::values];
    a.sums.values_of(hw, channel, all, value);
    of_channel = statistics.of_rank(hw, channel, all, value);
    if constexpr (Sums::counts) too_few = of_channel.count == 1;
    A k[Map::coefficients];
    a.map.coefficients_of(of_channel, gamma, beta, k);
    SYNCNORM_UNROLL
    for (int i = 0; i < Map::coefficients; ++i) hw.store(&shared.coefficients.k[i][0], k[i]);
  }
  if (hw.barrier_or(too_few || failed_before)) {
    if (hw.block() != 0) return;
    if (hw.thread() == 0) write_header(hw, a.packet, 0.0, false);
    hw.barrier();
    incoming_packets const from{{a.packet.to.data, 1}, a.cut.channels};
    statistics.fail(hw, from, failed_before ? pass_fault::disagreement : pass_fault::one_value);
    return;
  }
  if (hw.thread() == 0) statistics.commit(hw, channel, of_channel);
  statistics.count_pass(hw, a.cut.groups, of_channel.count);

  A k[1][Map::coefficients];
  SYNCNORM_UNROLL
  for (int i = 0; i < Map::coefficients; ++i) k[0][i] = hw.load(&shared.coefficients.k[i][0]);
  auto const put = [&]<known K>(std::integral_constant<known, K>) {
    map_batch<Map, axis::positions, 1> one;
    kept.get(hw, items.item(), one.in[0]);
    a.map.template load_rest<axis::positions, K>(hw, items.template here<K>(), one.in[0]);
    one.template store<K, 1, true>(hw, a.map, items, k);
  };
  while (items.inside()) {
    known const next = items.next(1, 1);
    if (next == known::whole)
      put(std::integral_constant<known, known::whole>{});
    else if (next == known::aligned)
      put(std::integral_constant<known, known::aligned>{});
    else
      put(std::integral_constant<known, known::nothing>{});
  }
}

} // namespace syncnorm::cuda::detail
