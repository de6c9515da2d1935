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
  geometry cut; ///< pieces of a group are the blocks of a cluster
  Sums sums;
  Map map;
  outgoing_packet packet; ///< its memory serves the report of a failure
};

template <class Sums, class Map, axis Axis, int Threads>
struct fused_storage {
  typename reduction<Sums, Axis, Threads>::storage sums;
  map_storage<Map, Axis> coefficients;
  double of_block[Sums::parts];
};

/// Bytes of dynamic shared memory by which a piece of a group stays on the chip.
template <class Sums>
[[nodiscard]] constexpr std::int64_t fused_bytes(geometry const& cut) {
  return cut.per_piece * cut.lanes * Sums::inputs * 16;
}

/// The packs of a piece in shared memory: each thread finds there what it put there.
template <class Sums>
class kept_packs {
public:
  using T = typename Sums::element_type;

  SYNCNORM_DEVICE kept_packs(std::byte* room, geometry const& cut, part_of_group const& part)
      : room_{reinterpret_cast<T*>(room)}, first_{part.begin * cut.lanes}, packs_{cut.per_piece * cut.lanes} {}

  /// The packs of a batch, of which `items` is the first.
  template <axis Axis, int Unroll, class Hw>
  SYNCNORM_DEVICE void put(Hw const& hw, walk<Axis, T> items, batch<Sums, Unroll> const& some) const {
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u, items.advance()) {
      if (!items.inside()) return;
      SYNCNORM_UNROLL
      for (int i = 0; i < Sums::inputs; ++i) hw.store_pack(place(items.number(), i), some.in[u][i], cached::normally);
    }
  }
  template <axis Axis, int Inputs, class Hw>
  SYNCNORM_DEVICE void get(Hw const& hw, walk<Axis, T> const& items, pack<T> (&in)[Inputs]) const {
    SYNCNORM_UNROLL
    for (int i = 0; i < Sums::inputs; ++i)
      in[i] = hw.load_pack(static_cast<T const*>(place(items.number(), i)), cached::normally);
  }

private:
  [[nodiscard]] SYNCNORM_DEVICE T* place(std::int64_t number, int i) const {
    return room_ + (i * packs_ + number - first_) * pack_length<T>;
  }

  T* room_;
  std::int64_t first_, packs_;
};

/// A pass of one rank alone over groups that fit into shared memory, a block or a cluster of blocks to a group: reads once and writes
/// once.
template <class Sums, class Map, axis Axis, int Threads, class Hw>
SYNCNORM_DEVICE void fused_kernel(Hw const& hw, fused_arguments<Sums, Map> const& a) {
  using T = typename Sums::element_type;
  using A = typename Map::A;
  using reducer = reduction<Sums, Axis, Threads>;
  constexpr int length = pack_length<T>;
  auto const& statistics = a.map.statistics;
  auto& shared = hw.template shared<fused_storage<Sums, Map, Axis, Threads>>();
  auto const part = part_of_group::of_cluster(a.cut, hw.block());
  kept_packs<Sums> const kept{hw.dynamic_shared(), a.cut, part};
  // No block may end as long as others read what it has.
  auto const leave = [&] {
    if (Axis == axis::positions && part.pieces > 1) hw.cluster_barrier();
  };
  int const channels = Axis == axis::positions ? 1 : a.cut.lanes * length;
  std::int64_t const channel = static_cast<std::int64_t>(part.group) * channels + hw.thread();
  bool const has_channel = hw.thread() < channels && channel < a.cut.channels;

  // In flight while elements are summed.
  bool const failed_before = statistics.failed_before(hw);
  double const gamma = has_channel ? load_value(hw, statistics.affine.gamma, channel, 1) : 0,
               beta = has_channel ? load_value(hw, statistics.affine.beta, channel, 0) : 0;
  double all[Sums::parts]{};
  reducer::sum_part(hw, a.sums, a.cut, part, kept, shared.sums, all);
  if (Axis == axis::positions && part.pieces > 1)
    reducer::combine_cluster(hw, shared.of_block, static_cast<int>(part.pieces), all);

  bool too_few = false;
  typename std::remove_cvref_t<decltype(statistics)>::summary of_channel{};
  A made[Map::coefficients]{};
  if (has_channel) {
    double value[Sums::values];
    a.sums.values_of(hw, channel, all, value);
    of_channel = statistics.of_rank(hw, channel, all, value);
    if constexpr (Sums::counts) too_few = of_channel.count == 1;
    a.map.coefficients_of(of_channel, gamma, beta, made);
  }
  if (hw.thread() < channels) {
    SYNCNORM_UNROLL
    for (int i = 0; i < Map::coefficients; ++i) hw.store(&shared.coefficients.k[i][hw.thread()], made[i]);
  }
  if (hw.barrier_or(too_few || failed_before)) {
    if (hw.block() == 0) {
      if (hw.thread() == 0) write_header(hw, a.packet, 0.0, false);
      hw.barrier();
      incoming_packets const from{{a.packet.to.data, 1}, a.cut.channels};
      statistics.fail(hw, from, failed_before ? pass_fault::disagreement : pass_fault::one_value);
    }
    return leave();
  }
  if (part.piece == 0) {
    if (has_channel) statistics.commit(hw, channel, of_channel);
    statistics.count_pass(hw, a.cut.groups, of_channel.count);
  }

  coefficient_set<Map, Axis> k;
  k.read(hw, shared.coefficients, Axis == axis::positions ? 0 : hw.thread() % a.cut.lanes * length);
  walk<Axis, T> items{a.cut, a.sums.lead(), part, hw.thread(), hw.threads()};
  auto const put = [&]<known K>(std::integral_constant<known, K>) {
    map_batch<Map, Axis, 1> one;
    kept.get(hw, items, one.in[0]);
    a.map.template load_rest<Axis, K>(hw, items.template here<K>(), one.in[0]);
    one.template store<K, 1, true>(hw, a.map, items, k.of);
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
  leave();
}

} // namespace syncnorm::cuda::detail
