#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/cuda/detail/accumulator.hpp>
#include <syncnorm/cuda/detail/dense_rows.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/kept_packs.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/detail/reduce_ops.hpp>

namespace syncnorm::cuda::detail {

template <class Op>
struct reduce_arguments {
  geometry cut;
  Op op;
  outgoing_packet packet;
  std::uint32_t* tickets; ///< of each group: how many of its pieces are done; 0 between launches
  double* partials;       ///< of each piece of each group: the parts of its channels
};

/// Divides by `value` what is less than 1024, as it is itself, by a product and a shift.
struct small_divisor {
  int value;
  std::uint32_t factor;

  explicit SYNCNORM_HOST_DEVICE constexpr small_divisor(int by)
      : value{by}, factor{((1u << 20) + static_cast<std::uint32_t>(by) - 1) / static_cast<std::uint32_t>(by)} {}
  [[nodiscard]] SYNCNORM_HOST_DEVICE constexpr int divide(int what) const {
    return value == 1 ? what : static_cast<int>(static_cast<std::uint32_t>(what) * factor >> 20);
  }
};

/// Channels that a channel of an op's tensors is in packets.
template <class Op>
inline constexpr int components_of = [] {
  if constexpr (requires { Op::components; })
    return Op::components;
  else
    return 1;
}();

/// What the blocks of a group put together.
template <class Op, axis Axis>
inline constexpr int most_channels = Axis == axis::positions ? 1 : line_lanes* pack_length<typename Op::element_type>;

template <class Op, axis Axis, int Threads>
struct reduce_storage {
  double parts[Op::parts][Threads / 32];
  bool last;
};
template <class Op, int Threads>
struct reduce_storage<Op, axis::channels, Threads> {
  typename pack_accumulator<Op, Threads>::storage cells;
  bool last;
};

template <class Op, axis Axis, int Threads>
class reduction {
public:
  using T = typename Op::element_type;
  using storage = reduce_storage<Op, Axis, Threads>;
  static constexpr int length = pack_length<T>;

  /// The parts of a group's channels over the items of each thread: of channel number i in thread i. Without `Columns`, channels of the
  /// tensors are those of the layer.
  template <bool Columns, class Hw, class From, class Items>
  static SYNCNORM_DEVICE void sum_part(Hw const& hw, Op const& op, geometry const& cut, From const& from, Items items,
                                       storage& shared, double (&all)[Op::parts]) {
    if constexpr (Axis == axis::positions) {
      channel_accumulator<Op> sums{hw, op, items.channel()};
      add_items<Axis>(hw, op, from, items, sums);
      sums.finish(all);
      combine_block(hw, shared, all);
    } else {
      small_divisor const columns{Columns ? static_cast<int>(cut.columns) : 1};
      pack_accumulator<Op, Threads> sums{
          hw, op, shared.cells, items.channel(), Columns ? cut.channels_of_layer<Axis>() : cut.channels, columns.value};
      add_items<Axis>(hw, op, from, items, sums);
      sums.finish(hw);
      hw.barrier();
      int const rows = Threads / cut.lanes, channels = Columns ? channels_of_group(cut) : cut.lanes * length,
                first = hw.thread() % channels * columns.value;
      auto const at = [&](int i, int p) {
        int const row = columns.divide(i), column = first + i - row * columns.value,
                  thread = row * cut.lanes + column / length;
        if constexpr (Op::counts)
          if (p == 0) return hw.load(&shared.cells.count[thread]);
        return hw.load(&shared.cells.of[p - (Op::counts ? 1 : 0)][column % length][thread]);
      };
      combine_rows(hw, shared, at, channels, rows * columns.value, all);
    }
  }

  /// Those of the layer.
  [[nodiscard]] static SYNCNORM_DEVICE int channels_of_group(geometry const& cut) {
    return Axis == axis::positions ? 1 : static_cast<int>(cut.channel_of<Axis>(cut.lanes * length));
  }

  /// k parts of each of `channels`, a power of two, of channel number i in thread i: rows of threads take every so many parts, and then
  /// what they got is put together, up to eight at a time.
  template <class Hw, class At>
  static SYNCNORM_DEVICE void combine_rows(Hw const& hw, storage& shared, At const& at, int channels, int k,
                                           double (&all)[Op::parts]) {
    int rows = Threads / channels;
    int const row = hw.thread() / channels;
    auto const of_row = [&](int i, int p) { return at(i * rows + row, p); };
    Op::combine(of_row, k > row ? (k - row + rows - 1) / rows : 0, all);
    hw.barrier(); // the parts may be where the scratch is
    double* const scratch = reinterpret_cast<double*>(&shared.cells);
    static_assert(sizeof(shared.cells) >= Op::parts * Threads * sizeof(double));
    while (rows > 1) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Op::parts; ++p) hw.store(scratch + p * Threads + hw.thread(), all[p]);
      hw.barrier();
      int const together = rows < 8 ? rows : 8;
      rows = rows < 8 ? 1 : rows / 8;
      if (row < rows) {
        auto const of_thread = [&](int i, int p) {
          return hw.load(scratch + p * Threads + i * rows * channels + hw.thread());
        };
        Op::combine(of_thread, together, all);
      }
      if (rows > 1) hw.barrier();
    }
  }

  template <class Hw>
  static SYNCNORM_DEVICE void combine_block(Hw const& hw, storage& shared, double (&all)[Op::parts]) {
    int const warps = hw.threads() / 32;
    Op::combine_warp(hw, all);
    int const lane = hw.thread() % 32, warp = hw.thread() / 32;
    if (lane == 0) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Op::parts; ++p) hw.store(&shared.parts[p][warp], all[p]);
    }
    hw.barrier();
    if (warp != 0) return;
    SYNCNORM_UNROLL
    for (int p = 0; p < Op::parts; ++p) all[p] = lane < warps ? hw.load(&shared.parts[p][lane]) : 0.0;
    Op::combine_warp(hw, all);
  }

  /// The parts of all blocks of a cluster, in the first warp of each, of the parts that each has there. No block may end before a
  /// `cluster_wait` of all of its threads: others read what it has.
  template <class Hw>
  static SYNCNORM_DEVICE void combine_cluster(Hw const& hw, double (&of_block)[Op::parts], int blocks,
                                              double (&all)[Op::parts]) {
    if (hw.thread() == 0) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Op::parts; ++p) hw.store(&of_block[p], all[p]);
    }
    hw.cluster_arrive(hw.thread() < 32);
    hw.cluster_wait();
    if (hw.thread() < 32) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Op::parts; ++p) all[p] = hw.thread() < blocks ? hw.load_from(hw.thread(), &of_block[p]) : 0.0;
      Op::combine_warp(hw, all);
    }
    hw.cluster_arrive(false);
  }
};

/// Sums the channels of `[N, C, S]` and writes this rank's packet. The last block of a group to arrive puts the parts of all
/// together, in the order of pieces, so that the bits do not depend on who that is.
template <class Op, axis Axis, int Threads, class Hw>
SYNCNORM_DEVICE void reduce_kernel(Hw const& hw, reduce_arguments<Op> const& a) {
  using reducer = reduction<Op, Axis, Threads>;
  hw.let_next_begin();
  if (a.cut.groups == 0) {
    if (hw.thread() == 0) write_header(hw, a.packet, 0.0, false);
    return;
  }
  auto& shared = hw.template shared<typename reducer::storage>();
  auto const of = part_of_group::of_block(a.cut, hw.block());
  double all[Op::parts]{};
  if (a.cut.unit == 0)
    reducer::template sum_part<true>(
        hw, a.op, a.cut, from_tensors{},
        walk<Axis, typename Op::element_type>{a.cut, a.op.lead(), of, hw.thread(), hw.threads()}, shared, all);
  if constexpr (has_units<Op, Axis>)
    if (a.cut.unit != 0) {
      kept_packs<Op> const kept{hw.dynamic_shared(), a.cut};
      fetch_units_of<unit_of_reductions>(hw, a.op, kept, of, unit_walk{a.cut, of, hw.thread(), hw.threads()});
      reducer::template sum_part<false>(hw, a.op, a.cut, kept, gather_units(hw, a.op, kept, of, unit_of_reductions),
                                        shared, all);
    }

  constexpr int width = most_channels<Op, Axis>;
  int const lane = hw.thread(), channels = reducer::channels_of_group(a.cut);
  if (of.pieces > 1) {
    auto const partial = [&](std::int64_t i, int p) {
      std::int64_t const place = static_cast<std::int64_t>(of.group) * of.pieces + i;
      return a.partials + ((place * Op::parts + p) * width + (Axis == axis::positions ? 0 : lane % channels));
    };
    if (lane < channels) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Op::parts; ++p) hw.store(partial(of.piece, p), all[p]);
    }
    hw.barrier();
    if (hw.thread() == 0)
      hw.store(&shared.last, hw.atomic_increment(a.tickets + of.group, of.pieces - 1) == of.pieces - 1);
    hw.barrier();
    if (!hw.load(&shared.last)) return;
    int const pieces = static_cast<int>(of.pieces);
    auto const at = [&](int i, int p) { return hw.load(partial(i, p)); };
    if constexpr (Axis == axis::positions) {
      if (hw.thread() >= 32) return;
      auto const of_lane = [&](int i, int p) { return at(i * 32 + lane, p); };
      Op::combine(of_lane, pieces > lane ? (pieces - lane + 31) / 32 : 0, all);
      Op::combine_warp(hw, all);
    } else {
      reducer::combine_rows(hw, shared, at, channels, pieces, all);
    }
  }
  std::int64_t const channel = static_cast<std::int64_t>(of.group) * channels + lane;
  std::int64_t const all_channels = a.cut.template channels_of_layer<Axis>();
  if (lane >= channels || channel >= all_channels) return;
  double value[Op::values];
  a.op.values_of(hw, channel, all, value);
  constexpr int components = components_of<Op>;
  std::int64_t const row = all_channels * components, first = channel * components;
  if (a.packet.to.before != nullptr)
    Op::add_before(hw, incoming_packets{{a.packet.to.before, 1}, row}, channel, all, value);
  SYNCNORM_UNROLL
  for (int v = 0; v < Op::values; ++v)
    hw.store(values_of(a.packet.to) + v / components * row + first + v % components, value[v]);
  if constexpr (Op::counts)
    if (double* const weighted = a.packet.to.weighted; weighted != nullptr) {
      SYNCNORM_UNROLL
      for (int i = 0; i < components; ++i) hw.store(weighted + first + i, all[0] * value[i]);
      if (channel == 0) hw.store(weighted + row, all[0]);
    }
  if (channel == 0) write_header(hw, a.packet, all[0], Op::counts);
}

} // namespace syncnorm::cuda::detail
