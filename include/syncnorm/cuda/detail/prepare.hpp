#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/dense_rows.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/fused_kernel.hpp>
#include <syncnorm/cuda/detail/kept_kernels.hpp>
#include <syncnorm/cuda/detail/map_kernel.hpp>
#include <syncnorm/cuda/detail/pack_stream.hpp>
#include <syncnorm/cuda/detail/plan.hpp>
#include <syncnorm/cuda/detail/reduce_kernel.hpp>
#include <syncnorm/cuda/operands.hpp>

// The arguments of launches. Kernels know 16-bit elements by types of their own, so views come in with their element type
// replaced already.
namespace syncnorm::cuda::detail {

/// `saved_count`: of the forward pass of a backward pass.
[[nodiscard]] inline outgoing_packet make_outgoing(packet_header const& header, packet_place const& to,
                                                   std::int64_t const* saved_count) {
  outgoing_packet packet{std::bit_cast<header_image>(header), {}, saved_count, to};
  using syncnorm::detail::forward_pass_failed, syncnorm::detail::no_room_to_keep;
  static_assert(sizeof forward_pass_failed <= sizeof packet.failed && sizeof no_room_to_keep <= sizeof packet.failed);
  if (saved_count != nullptr) {
    std::memcpy(packet.failed, forward_pass_failed, sizeof forward_pass_failed);
  } else {
    packet.failing = to.kept_state;
    std::memcpy(packet.failed, no_room_to_keep, sizeof no_room_to_keep);
  }
  return packet;
}

/// What the packets of `Op` depend on, besides its tensors.
template <class Op>
[[nodiscard]] std::int64_t const* saved_count_of(Op const& op) {
  if constexpr (requires { op.saved; })
    return op.saved.count;
  else
    return nullptr;
}

/// The unit of all tensors of `ops`, in bytes; 0 where they have none.
template <class... Ops>
[[nodiscard]] int unit_of_tensors(Ops const&... ops) {
  int unit = 16;
  auto const shrink = [&](auto const& t) {
    unit = std::min(unit, unit_of(t));
    return true;
  };
  (void)(Ops::each_tensor(ops, shrink) && ...);
  return ((ops.mask.data == nullptr) && ...) ? unit : 0;
}

/// Bytes that a block keeps where a multiprocessor is to hold `blocks` of them along positions, which have little beside.
[[nodiscard]] constexpr std::int64_t room_to_keep(device_limits const& limits, int blocks) {
  return limits.shared_per_block / blocks - 2 * 1024;
}

/// Takes the items of a cut along positions as units where they can be.
template <class... Ops>
void take_units(geometry& cut, Ops const&... ops) {
  constexpr int size = std::min({static_cast<int>(sizeof(typename Ops::element_type))...});
  cut.unit = unit_of_tensors(ops...);
  if (cut.unit == 0) return;
  cut.inner = cut.spatial * size / cut.unit;
  std::int64_t const of_pack = 16 / cut.unit;
  cut.per_piece = up_to(up_to(cut.items(), cut.pieces), of_pack) * of_pack;
  cut.step_outer = cut.threads / cut.inner;
  cut.step_inner = cut.threads % cut.inner;
}

/// Cuts rows that are no packs throughout by units, where they can be, into pieces of which a block keeps 64 KB in all, and a multiprocessor
/// two at least; no more than `most` to a channel.
template <class Op>
void cut_by_units(geometry& cut, Op const& op, int threads, std::int64_t most, device_limits const& limits) {
  if constexpr (has_units<Op, axis::positions>) {
    if (cut.whole || axis_of(op.lead()) != axis::positions || op.lead().size() == 0) return;
    auto by_units = cut_tensor(op.lead(), threads, 0, 1, 1, 1);
    std::int64_t const pieces =
        up_to(kept_bytes(op, by_units), std::min<std::int64_t>(64 * 1024, room_to_keep(limits, 2)));
    if (unit_of_tensors(op) != unit_of_reductions || pieces > most || by_units.items() >= std::int64_t{1} << 29) return;
    by_units.pieces = static_cast<std::uint32_t>(pieces);
    take_units(by_units, op);
    cut = by_units;
  }
}

/// `columns_of` a map: of rows that are no whole packs, and of short ones of so many samples that the coefficients of all columns cost
/// little; else 1.
template <class Op>
[[nodiscard]] std::int64_t mapped_columns_of(Op const& op) {
  using T = typename Op::element_type;
  auto const columns = columns_of(op);
  bool const is_short = columns * static_cast<std::int64_t>(sizeof(T)) <= 1024;
  return columns % pack_length<T> != 0 || (is_short && op.lead().samples >= 256) ? columns : 1;
}

/// `columns_of` a reduction, which has to put them together in the end: 1 where threads have so few packs that it takes longer for that
/// than for rows, or for their units.
template <class Op>
[[nodiscard]] std::int64_t summed_columns_of(Op const& op, int threads, device_limits const& limits) {
  using T = typename Op::element_type;
  auto const columns = columns_of(op), packs = op.lead().size() / pack_length<T>;
  if (columns % pack_length<T> == 0 || columns == 1 || lanes_of_channels<T>(columns, 0, threads, 0) == 0) return 1;
  bool const by_units = has_units<Op, axis::positions> && unit_of_tensors(op) == unit_of_reductions;
  return packs >= (by_units ? 32 : 4) * std::int64_t{threads} * limits.multiprocessors ? columns : 1;
}

template <class Op>
[[nodiscard]] reduce_arguments<Op> make_reduction(Op const& op, packet_header const& header, packet_place const& packet,
                                                  workspace const& work, device_limits const& limits, int threads) {
  workspace_layout const layout{work, op.lead().channels};
  reduce_arguments<Op> a{{}, op, make_outgoing(header, packet, saved_count_of(op)), layout.tickets, layout.partials};
  auto const columns = summed_columns_of(op, threads, limits);
  if (columns != 1) take_columns(a.op);
  flatten(a.op);
  // Of a header with a fault the header alone is written.
  if (header.fault[0] != '\0') return a;
  a.cut = cut_for_reduction(a.op, columns, threads, limits);
  cut_by_units(a.cut, a.op, threads, most_pieces_of_rows<Op>(a.cut.groups, limits), limits);
  return a;
}

/// Takes the whole packs of a map through a stream, where two blocks of a multiprocessor have room for it.
template <class Op>
void set_stream(geometry& cut, Op const& op, device_limits const& limits) {
  if constexpr (streams<Op, axis::channels>) {
    constexpr int besides = 1024 + static_cast<int>(sizeof(map_storage<Op, axis::channels, most_map_lanes>));
    cut.streamed = cut.whole && axis_of(op.lead()) == axis::channels &&
                   pack_stream<Op>::bytes(cut.threads) + besides <= limits.shared_per_block / 2;
  }
}

template <class Op>
[[nodiscard]] map_arguments<Op> make_map(Op const& op, device_limits const& limits, int threads) {
  map_arguments<Op> a{{}, op};
  auto const columns = mapped_columns_of(op);
  if (columns != 1) take_columns(a.op);
  flatten(a.op);
  a.cut = cut_for_map(a.op, columns, threads, limits);
  set_stream(a.cut, a.op, limits);
  return a;
}

/// Whether what a pass reads and writes is more than the cache holds, so that it is not kept.
template <class T>
[[nodiscard]] constexpr cached use_of(tensor_view<T> const& x) {
  return x.size() * static_cast<std::int64_t>(sizeof(T)) > (std::int64_t{16} << 20) ? cached::last : cached::normally;
}

template <class T>
[[nodiscard]] mask_view written_mask(batch_norm_epilogue<T> const& epilogue) {
  return epilogue.masked == masked_outputs::zero ? epilogue.mask : mask_view{};
}

/// Ops that tell zeroes from other outputs take the mask as it is; for the others it is only there where outputs are 0.
template <class Op, class T>
void set_epilogue(Op& op, batch_norm_epilogue<T> const& epilogue) {
  // No gradient depends on what was added, unless it was activated.
  bool const of_gradient = requires { op.dy; };
  if (!of_gradient || !epilogue.activation.is_identity()) op.residual = epilogue.residual;
  op.slope = static_cast<accumulate_t<T>>(epilogue.activation.negative_slope);
  if constexpr (requires { op.zeroes; }) {
    op.mask = epilogue.mask;
    op.zeroes = epilogue.masked == masked_outputs::zero;
  } else {
    op.mask = written_mask(epilogue);
  }
}

template <class Op, class Statistics>
void set_statistics(Op& op, Statistics const& statistics) {
  op.statistics = statistics;
  auto& stride = op.statistics.packets.stride;
  if (stride == 0) stride = packet_bytes(op.x.channels, Statistics::values);
}

template <class T, epilogue_kind Kind>
[[nodiscard]] normalize_op<T, Kind> make_normalize(tensor_view<T const> x, tensor_view<T> y,
                                                   batch_norm_epilogue<T> const& epilogue,
                                                   forward_statistics const& statistics) {
  normalize_op<T, Kind> op;
  op.x = x, op.y = y;
  set_statistics(op, statistics);
  op.use = use_of(x);
  if constexpr (Kind != epilogue_kind::none) set_epilogue(op, epilogue);
  return op;
}

[[nodiscard]] inline forward_statistics make_statistics(affine_values const& affine, batch_norm_options const& options,
                                                        gathered_packets const& packets, saved_statistics const& saved,
                                                        running_outputs const& running, fault_report const& report,
                                                        std::uint32_t* ticket,
                                                        std::int64_t const* kept_state = nullptr) {
  forward_statistics made{
      packets, options.eps, options.momentum.value_or(-1.0), options.variance, saved, running, affine, report,
      ticket,  kept_state};
  made.saved.normalized_by = options.normalize_by;
  return made;
}

template <class T, epilogue_kind Kind>
[[nodiscard]] backward_sums_op<T, Kind>
make_backward_sums(tensor_view<T const> dy, tensor_view<T const> x, affine_values const& affine,
                   batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved) {
  backward_sums_op<T, Kind> op;
  op.dy = dy, op.x = x;
  op.saved = saved;
  op.affine = affine;
  if constexpr (Kind != epilogue_kind::none) set_epilogue(op, epilogue);
  return op;
}

template <class T, epilogue_kind Kind>
[[nodiscard]] gradient_op<T, Kind> make_gradient(tensor_view<T const> dy, tensor_view<T const> x, tensor_view<T> dx,
                                                 tensor_view<T> dresidual, batch_norm_epilogue<T> const& epilogue,
                                                 backward_statistics const& statistics) {
  gradient_op<T, Kind> op;
  op.dy = dy, op.x = x, op.dx = dx, op.dresidual = dresidual;
  set_statistics(op, statistics);
  op.use = use_of(x);
  if constexpr (Kind != epilogue_kind::none) set_epilogue(op, epilogue);
  return op;
}

template <class T, bool Epilogue>
[[nodiscard]] double_backward_sums_op<T, Epilogue>
make_double_backward_sums(tensor_view<T const> u, tensor_view<T const> dy, tensor_view<T const> x,
                          affine_values const& affine, batch_norm_epilogue<T> const& epilogue,
                          saved_statistics const& saved, channel_values const& gamma_gradient) {
  double_backward_sums_op<T, Epilogue> op;
  op.u = u, op.dy = dy, op.x = x;
  op.saved = saved;
  op.affine = affine;
  op.gamma_gradient = gamma_gradient;
  if constexpr (Epilogue) set_epilogue(op, epilogue);
  return op;
}

/// `v`: the gradient with respect to dresidual.
template <class T, bool Epilogue>
[[nodiscard]] double_gradient_op<T, Epilogue>
make_double_gradient(tensor_view<T const> u, tensor_view<T const> v, tensor_view<T const> dy, tensor_view<T const> x,
                     tensor_view<T> to_dy, tensor_view<T> to_x, batch_norm_epilogue<T> const& epilogue,
                     double_backward_statistics const& statistics) {
  double_gradient_op<T, Epilogue> op;
  op.u = u, op.dy = dy, op.x = x, op.to_dy = to_dy, op.to_x = to_x;
  set_statistics(op, statistics);
  op.use = use_of(x);
  if constexpr (Epilogue) {
    op.v = v;
    set_epilogue(op, epilogue);
  }
  return op;
}

/// x of the y that `made` says it was made by, in the same memory.
template <class T, epilogue_kind Kind>
[[nodiscard]] normalize_op<T, Kind> make_recover(tensor_view<T> y, batch_norm_epilogue<T> const& made,
                                                 affine_values const& affine, saved_statistics const& saved,
                                                 kept_channels const& kept) {
  forward_statistics statistics;
  statistics.saved = saved, statistics.affine = affine, statistics.of = map_of::y;
  if (kept.once) statistics.kept_state = kept.state;
  return make_normalize<T, Kind>(y, y, {{1 / recoverable_slope(made.activation)}, made.residual}, statistics);
}

template <class T>
[[nodiscard]] choose_arguments make_choose(std::int64_t channels, affine_values const& affine, activation const& of,
                                           kept_channels const& kept) {
  return {affine, channels, recoverable_slope(of), recoverable_ratio<T>, kept};
}

/// What elements are copied as.
template <class T>
using copied_word =
    std::conditional_t<sizeof(T) == 2, std::uint16_t, std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;

template <class T>
[[nodiscard]] copy_arguments<copied_word<T>> make_copy(tensor_view<T> const& x, kept_channels const& kept,
                                                       std::int64_t const* saved_count) {
  using word = copied_word<T>;
  return {view_as<word>(x), kept, saved_count};
}

/// Blocks of 256 threads of a copy: as many as are resident, or as there are elements for at most.
template <class T>
[[nodiscard]] std::uint32_t copy_blocks(tensor_view<T> const& x, kept_channels const& kept,
                                        device_limits const& limits) {
  return static_cast<std::uint32_t>(
      std::min<std::int64_t>(std::int64_t{8} * limits.multiprocessors, up_to(x.count() * kept.room, 256)));
}

/// A group along positions is a cluster of as many blocks, a power of two, as it takes for a multiprocessor to hold two, of which one
/// reads while another sums, up to what a cluster may have. Smaller units take more instructions, and so threads: there it is to hold three.
/// Where it does so anyway, blocks of half as many threads leave room for them.
template <class Sums>
[[nodiscard]] geometry cut_for_fused(Sums const& sums, int threads, device_limits const& limits) {
  int const lanes = lanes_of_lines(sums.lead(), line_lanes);
  auto cut = cut_tensor(sums.lead(), threads, 0, 1, 1, lanes);
  if (axis_of(sums.lead()) != axis::positions) return cut;
  bool const whole = unit_of_tensors(sums) == 16;
  std::int64_t const bytes = kept_bytes(sums, cut), room = room_to_keep(limits, whole ? 2 : 3);
  if (whole && cut.threads == 256 && bytes <= room / 2) return cut_tensor(sums.lead(), 128, 0, 1, 1, lanes);
  while (cut.pieces < static_cast<std::uint32_t>(limits.cluster_blocks) && kept_bytes(sums, cut) > room) {
    cut.pieces *= 2;
    cut.per_piece = up_to(cut.items(), cut.pieces);
  }
  return cut;
}

template <class Sums, class Map>
[[nodiscard]] fused_arguments<Sums, Map> make_fused(Sums const& sums, Map const& map, packet_header const& header,
                                                    packet_place const& packet, device_limits const& limits,
                                                    int threads) {
  fused_arguments<Sums, Map> a{{}, sums, map, make_outgoing(header, packet, saved_count_of(sums))};
  flatten(a.sums, a.map);
  a.cut = cut_for_fused(a.sums, threads, limits);
  set_access(a.cut, a.sums, a.map);
  if (axis_of(a.sums.lead()) == axis::positions) take_units(a.cut, a.sums, a.map);
  return a;
}

/// Whether two kernels by columns take less time than one launch by units does: where these are of 2 bytes, or blocks are many and small.
template <class Sums>
[[nodiscard]] bool are_better_as_columns(Sums const& sums, int threads, device_limits const& limits) {
  if (summed_columns_of(sums, threads, limits) == 1) return false;
  int const unit = unit_of_tensors(sums);
  auto const bytes = sums.lead().samples * sums.lead().spatial * static_cast<std::int64_t>(sizeof(*sums.lead().data));
  return unit == 2 || (unit == 4 && Sums::needed_inputs * bytes <= 64 * 1024 &&
                       sums.lead().channels >= std::int64_t{8} * limits.multiprocessors);
}

/// Whether a pass of one rank is better done by groups that stay on the chip: they fit, of clusters two blocks to a multiprocessor, and
/// there are enough of them to keep half of the multiprocessors busy, or they are so short that a launch is most of the time.
template <class Sums>
[[nodiscard]] bool fits_on_chip(Sums const& sums, int threads, int static_shared, device_limits const& limits) {
  if (sums.lead().size() == 0 || are_better_as_columns(sums, threads, limits)) return false;
  auto const cut = cut_for_fused(sums, threads, limits);
  auto const bytes = kept_bytes(sums, cut);
  auto const room = cut.pieces == 1 ? std::int64_t{limits.shared_per_block} - static_shared : room_to_keep(limits, 2);
  return bytes <= room && (2 * std::int64_t{cut.blocks()} >= limits.multiprocessors || bytes <= 128 * 1024);
}

} // namespace syncnorm::cuda::detail
