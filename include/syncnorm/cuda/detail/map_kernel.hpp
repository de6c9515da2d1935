#pragma once

#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/cuda/detail/accumulator.hpp>
#include <syncnorm/cuda/detail/apply.hpp>
#include <syncnorm/cuda/detail/backward_op.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/double_backward_op.hpp>
#include <syncnorm/cuda/detail/forward_op.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/pack_stream.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>

namespace syncnorm::cuda::detail {

template <class Op>
struct map_arguments {
  geometry cut;
  Op op;
};

/// The coefficients of a group's channels, of `Lanes` packs along channels.
template <class Op, axis Axis, int Lanes>
struct alignas(16) map_storage {
  using A = typename Op::A;
  static constexpr int width = Axis == axis::positions ? 1 : Lanes * pack_length<typename Op::element_type>;
  A k[Op::coefficients][width];
};

/// The coefficients of a thread's channels. Those of a pack along channels are read anew for each batch: kept, they would take
/// the registers by which loads are in flight.
template <class Op, axis Axis>
struct coefficient_set {
  using A = typename Op::A;
  static constexpr int sets = Axis == axis::positions ? 1 : pack_length<typename Op::element_type>;
  A of[sets][Op::coefficients];

  template <int Lanes, class Hw>
  SYNCNORM_DEVICE void read(Hw const& hw, map_storage<Op, Axis, Lanes> const& shared, int first) {
    if constexpr (sets > 1) hw.forget();
    SYNCNORM_UNROLL
    for (int i = 0; i < Op::coefficients; ++i) {
      if constexpr (sets < pack_length<A>) {
        SYNCNORM_UNROLL
        for (int e = 0; e < sets; ++e) of[e][i] = hw.load(&shared.k[i][first + e]);
      } else {
        constexpr int step = pack_length<A>;
        SYNCNORM_UNROLL
        for (int e = 0; e < sets; e += step) {
          pack<A> const some = hw.load_pack(&shared.k[i][first + e], cached::normally);
          SYNCNORM_UNROLL
          for (int j = 0; j < step; ++j) of[e + j][i] = some[j];
        }
      }
    }
  }
};

/// Packs of a thread that are in flight at a time.
template <class Op, axis Axis, int Unroll>
struct map_batch {
  using T = typename Op::element_type;
  using A = typename Op::A;
  static constexpr int sets = Axis == axis::positions ? 1 : pack_length<T>;

  pack<T> in[Unroll][Op::inputs];

  template <known K, int Count = Unroll, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, Op const& op, walk<Axis, T> items) {
    SYNCNORM_UNROLL
    for (int u = 0; u < Count; ++u) {
      op.template load<Axis, K>(hw, items.template here<K>(), in[u]);
      items.template advance<K>();
    }
  }
  template <known K, int Count = Unroll, bool Forward = false, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, Op const& op, walk<Axis, T>& items, A const (&k)[sets][Op::coefficients]) {
    SYNCNORM_UNROLL
    for (int u = 0; u < Count; ++u) {
      spot const at = items.template here<K>();
      unsigned bits = ~0u;
      constexpr bool unmasked = Axis == axis::channels && K == known::whole;
      if (!unmasked && op.mask.data != nullptr)
        bits = counted<Axis, T>(load_mask<Axis, T, K>(hw, op.mask, at), existing<T, K>(at));
      pack<T> out[Op::outputs];
      apply_to_pack<Forward>(op, k, in[u], bits, out);
      op.template store<Axis, K>(hw, at, out);
      items.template advance<K>();
    }
  }
};

/// Merges the packets of all ranks, in each block for its own channels, and maps the elements by what comes of it. Where
/// ranks disagree, nothing is written but the report. The pieces are taken in the opposite order of reduce_kernel: what it
/// read last is the likeliest to be in the cache.
template <class Op, axis Axis, class Hw>
SYNCNORM_DEVICE void map_kernel(Hw const& hw, map_arguments<Op> const& a) {
  using T = typename Op::element_type;
  using A = typename Op::A;
  using batch_type = map_batch<Op, Axis, Op::unroll>;
  using statistics_type = std::remove_cvref_t<decltype(a.op.statistics)>;
  constexpr int length = pack_length<T>;
  geometry const& cut = a.cut;
  auto const& statistics = a.op.statistics;
  std::uint32_t const block = hw.blocks() - 1 - hw.block();
  auto const part = cut.groups > 0 ? part_of_group::of_block(cut, block) : part_of_group{0, block, 1, 0, 0};
  std::uint32_t const groups = cut.groups > 0 ? cut.groups : 1, group = part.group;

  // The first loads are in flight while the statistics are merged.
  walk<Axis, T> items{cut, a.op.lead(), part, hw.thread(), hw.threads()};
  batch_type some;
  known next = known::nothing;
  auto const load_next = [&] {
    next = items.inside() ? items.next(Op::unroll, Op::unroll_aligned) : known::nothing;
    if (next == known::whole)
      some.template load<known::whole>(hw, a.op, items);
    else if (next == known::aligned)
      some.template load<known::aligned, Op::unroll_aligned>(hw, a.op, items);
  };
  auto packs = [&] {
    if constexpr (streams<Op, Axis>)
      return pack_stream<Op>{hw, a.op, items};
    else
      return 0;
  }();
  if constexpr (streams<Op, Axis>)
    if (cut.streamed) packs.begin(hw);
  if (!cut.streamed) load_next();
  hw.wait_for_previous();

  auto& shared = hw.template shared<map_storage<Op, Axis, most_map_lanes>>();
  // And so is all that the statistics are made of: nothing here waits before it is merged.
  std::int64_t const channels = cut.channels_of_layer<Axis>();
  incoming_packets const from{statistics.packets, channels};
  bool const exchanged = statistics.packets.data != nullptr;
  auto const seen = exchanged ? from.look(hw) : incoming_packets::view_of_headers{};
  int const columns = Axis == axis::positions ? 1 : cut.lanes * length;
  std::int64_t const column = static_cast<std::int64_t>(group) * columns + hw.thread(),
                     channel = cut.channel_of<Axis>(column);
  bool const has_channel = hw.thread() < columns && column < cut.channels;
  bool refused = false;
  typename statistics_type::summary of_channel{};
  A made[Op::coefficients]{};
  if (has_channel) {
    of_channel = statistics.merge_ranks(hw, channels, channel);
    if constexpr (requires { statistics.refuses(hw, of_channel); }) refused = statistics.refuses(hw, of_channel);
    if constexpr (requires { a.op.coefficients_at(hw, channel, of_channel, made); })
      a.op.coefficients_at(hw, channel, of_channel, made);
    else
      a.op.coefficients_of(of_channel, load_value(hw, statistics.affine.gamma, channel, 1),
                           load_value(hw, statistics.affine.beta, channel, 0), made);
  }
  bool const disagree = exchanged && from.disagree(hw, seen);
  if (hw.thread() < columns) {
    SYNCNORM_UNROLL
    for (int i = 0; i < Op::coefficients; ++i) hw.store(&shared.k[i][hw.thread()], made[i]);
  }
  if (hw.barrier_or(disagree || refused)) {
    hw.wait_for_copies();
    if (block != 0) return;
    bool const others = hw.barrier_or(disagree);
    statistics.fail(hw, from, others ? pass_fault::disagreement : pass_fault::one_value);
    return;
  }
  if (part.piece == part.pieces - 1) { // which are among the first that run, while others have yet to read and write
    if (has_channel && (Axis == axis::positions || column == channel * cut.columns))
      statistics.commit(hw, channel, of_channel);
    statistics.count_pass(hw, groups, of_channel.count);
  }

  int const first = Axis == axis::positions ? 0 : hw.thread() % cut.lanes * length;
  coefficient_set<Op, Axis> k;
  if constexpr (Axis == axis::positions) k.read(hw, shared, first);
  if constexpr (streams<Op, Axis>)
    if (cut.streamed) {
      while (items.inside(Op::unroll)) {
        packs.next(hw, some.in);
        k.read(hw, shared, first);
        some.template store<known::whole>(hw, a.op, items, k.of);
      }
      hw.wait_for_copies();
      load_next();
    }
  while (items.inside()) {
    if (next == known::nothing) {
      map_batch<Op, Axis, 1> one;
      one.template load<known::nothing>(hw, a.op, items);
      if constexpr (Axis == axis::channels) k.read(hw, shared, first);
      one.template store<known::nothing>(hw, a.op, items, k.of);
    } else {
      if constexpr (Axis == axis::channels) k.read(hw, shared, first);
      if (next == known::whole)
        some.template store<known::whole>(hw, a.op, items, k.of);
      else
        some.template store<known::aligned, Op::unroll_aligned>(hw, a.op, items, k.of);
    }
    load_next();
  }
}

} // namespace syncnorm::cuda::detail
