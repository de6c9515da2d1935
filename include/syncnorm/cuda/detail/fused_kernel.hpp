#pragma once

#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/accumulator.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/dense_rows.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/kept_packs.hpp>
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
  map_storage<Map, Axis, line_lanes> coefficients;
  double of_block[Sums::parts];
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
  kept_packs<Sums> const kept{hw.dynamic_shared(), a.cut};
  bool const in_cluster = Axis == axis::positions && part.pieces > 1;
  auto const leave = [&] {
    if (in_cluster) hw.cluster_wait();
  };
  int const channels = Axis == axis::positions ? 1 : a.cut.lanes * length;
  std::int64_t const channel = static_cast<std::int64_t>(part.group) * channels + hw.thread();
  std::int64_t const channel_of_lane =
      (static_cast<std::int64_t>(part.group) * a.cut.lanes + hw.thread() % a.cut.lanes) * length;
  bool const has_channel = hw.thread() < channels && channel < a.cut.channels;

  bool const by_units = Axis == axis::positions && a.cut.unit != 0;
  if (by_units)
    fetch_units(hw, a.sums, kept, part, a.cut.unit, unit_walk{a.cut, part, hw.thread(), hw.threads()});
  else
    kept.fetch(hw, a.sums, walk<Axis, T>{a.cut, a.sums.lead(), part, hw.thread(), hw.threads()});
  // In flight with them.
  bool const failed_before = statistics.failed_before(hw);
  double const gamma = has_channel ? load_value(hw, statistics.affine.gamma, channel, 1) : 0,
               beta = has_channel ? load_value(hw, statistics.affine.beta, channel, 0) : 0;
  double all[Sums::parts]{};
  if (by_units) {
    reducer::template sum_part<false>(hw, a.sums, a.cut, kept, gather_units(hw, a.sums, kept, part, a.cut.unit),
                                      shared.sums, all);
  } else {
    hw.wait_for_copies();
    if (a.cut.whole && a.sums.mask.data == nullptr) {
      std::int64_t const first = Axis == axis::positions ? part.group : channel_of_lane,
                         elements = (part.end - part.begin) * a.cut.lanes * length;
      reducer::template sum_part<false>(
          hw, a.sums, a.cut, kept,
          kept_walk<T>{first, first < a.cut.channels ? elements : 0, hw.thread(), hw.threads()}, shared.sums, all);
    } else {
      reducer::template sum_part<false>(hw, a.sums, a.cut, kept,
                                        walk<Axis, T>{a.cut, a.sums.lead(), part, hw.thread(), hw.threads()},
                                        shared.sums, all);
    }
  }
  if (in_cluster) reducer::combine_cluster(hw, shared.of_block, static_cast<int>(part.pieces), all);

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
  if constexpr (Axis == axis::positions)
    if (by_units) {
      map_units(hw, a.map, kept, part, a.cut.unit, unit_walk{a.cut, part, hw.thread(), hw.threads()}, k.of);
      return leave();
    }
  walk<Axis, T> items{a.cut, a.sums.lead(), part, hw.thread(), hw.threads()};
  auto const put = [&]<known K, int Unroll>(std::integral_constant<known, K>, std::integral_constant<int, Unroll>) {
    map_batch<Map, Axis, Unroll> some;
    auto next = items;
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      spot const at = next.template here<K>();
      kept.template load<Axis, K>(hw, a.sums, next, at, some.in[u]);
      a.map.template load_rest<Axis, K>(hw, at, some.in[u]);
      next.template advance<K>();
    }
    some.template store<K, Unroll, true>(hw, a.map, items, k.of);
  };
  constexpr int unroll = Map::inputs == 1 ? 4 : 2;
  using one = std::integral_constant<int, 1>;
  while (items.inside()) {
    known const next = items.next(unroll, 1);
    if (next == known::whole)
      put(std::integral_constant<known, known::whole>{}, std::integral_constant<int, unroll>{});
    else if (next == known::aligned)
      put(std::integral_constant<known, known::aligned>{}, one{});
    else
      put(std::integral_constant<known, known::nothing>{}, one{});
  }
  leave();
}

} // namespace syncnorm::cuda::detail
