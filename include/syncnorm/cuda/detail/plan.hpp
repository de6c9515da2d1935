#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <type_traits>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

[[nodiscard]] constexpr std::int64_t up_to(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

/// Along which axis the packs of a launch lie: what is contiguous.
template <class T>
[[nodiscard]] constexpr axis axis_of(tensor_view<T> const& x) {
  return x.stride_c == 1 && (x.stride_s != 1 || x.spatial == 1) ? axis::channels : axis::positions;
}

/// Packs along channels that a block takes side by side: up to `most`, but only as far as lines of the cache fill them.
template <class T>
[[nodiscard]] int lanes_of_lines(tensor_view<T> const& lead, int most) {
  auto const packs = up_to(lead.channels, pack_length<std::remove_const_t<T>>);
  auto const filled = [&](int lanes) { return up_to(packs, lanes) * lanes; };
  int lanes = 1;
  while (lanes < most && lanes < packs && filled(2 * lanes) <= filled(line_lanes)) lanes *= 2;
  return lanes;
}

/// Cuts `[N, C, S]` into about `blocks` pieces in all, of at least `least` packs for each thread, in multiples of `together`, and at most
/// `most` pieces for a group. Blocks are of `threads` threads, or, along positions, of as few as leave each of them two packs: of small
/// blocks more fit on a multiprocessor. Along channels, a group is `lanes` packs wide.
template <class T>
[[nodiscard]] geometry cut_tensor(tensor_view<T> const& lead, int threads, std::int64_t blocks, std::int64_t least,
                                  std::int64_t most, int lanes, std::int64_t together = 1) {
  constexpr std::int64_t length = pack_length<std::remove_const_t<T>>;
  geometry cut;
  bool const is_empty = lead.samples == 0 || lead.spatial == 0;
  cut.samples = is_empty ? 0 : lead.samples;
  cut.channels = lead.channels;
  cut.spatial = lead.spatial;
  std::int64_t stride = threads;
  if (axis_of(lead) == axis::positions) {
    // Packs begin where they are aligned, so a row may have one more than it has room for.
    auto const off = [](std::int64_t elements) { return elements % length != 0; };
    bool const aligned = reinterpret_cast<std::uintptr_t>(lead.data) % 16 == 0 &&
                         !(off(lead.stride_n) && lead.samples > 1) && !(off(lead.stride_c) && lead.channels > 1);
    bool const anywhere = aligned || lead.stride_s != 1;
    cut.inner = std::max<std::int64_t>(1, up_to(lead.spatial + (anywhere ? 0 : length - 1), length));
    cut.groups = static_cast<std::uint32_t>(lead.channels);
    while (threads > 64 && cut.items() <= threads) threads /= 2;
    stride = threads;
  } else {
    cut.lanes = lanes;
    stride = threads / cut.lanes;
    cut.inner = std::max<std::int64_t>(1, lead.spatial);
    cut.groups = static_cast<std::uint32_t>(up_to(lead.channels, cut.lanes * length));
  }
  cut.threads = threads;
  std::int64_t const items = cut.items(), groups = std::max<std::int64_t>(1, cut.groups);
  std::int64_t const wanted = std::min({blocks / groups, up_to(items, stride * least), most});
  std::int64_t const step = stride * together;
  cut.per_piece = std::max<std::int64_t>(1, up_to(up_to(items, std::max<std::int64_t>(1, wanted)), step)) * step;
  cut.pieces = static_cast<std::uint32_t>(std::max<std::int64_t>(1, up_to(items, cut.per_piece)));
  cut.step_outer = stride / cut.inner;
  cut.step_inner = stride % cut.inner;
  return cut;
}

/// Whether every pack of `op` is one access of each tensor.
template <class Op>
[[nodiscard]] bool is_aligned_throughout(Op const& op) {
  using T = typename Op::element_type;
  auto const& lead = op.lead();
  if (lead.size() == 0) return false;
  bool const rows = axis_of(lead) == axis::positions;
  // Addresses are linear in sample, and in channel or position.
  auto const is_one = [&](std::int64_t sample, std::int64_t other) {
    spot at{sample, rows ? 0 : other, rows ? other : 0, {0, pack_length<T>}};
    if (rows)
      at.position -= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address(lead, at)) % 16 / sizeof(T));
    return Op::each_tensor(op, [&](auto const& t) {
      return rows ? is_one_access<axis::positions>(t, at) : is_one_access<axis::channels>(t, at);
    });
  };
  return is_one(0, 0) && is_one(lead.samples > 1 ? 1 : 0, 0) &&
         is_one(0, (rows ? lead.channels : lead.spatial) > 1 ? 1 : 0);
}

/// Whether 30 bits hold the extents and strides of a tensor, and a sign, so that 31 hold sums of two.
template <class T>
[[nodiscard]] bool is_narrow(tensor_view<T> const& t) {
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  auto const fits = [](std::int64_t value) { return -limit <= value && value < limit; };
  return fits(t.samples) && fits(t.channels) && fits(t.spatial) && fits(t.stride_n) && fits(t.stride_c) &&
         fits(t.stride_s);
}

/// The bytes of which all rows of `t` begin and end at a multiple: 16, 8 where elements have 2, for whose rows of 14² that is made, or
/// those of an element. 0 where positions are not contiguous or extents wide.
template <class T>
[[nodiscard]] int unit_of(tensor_view<T> const& t) {
  if (t.stride_s != 1 && t.spatial > 1) return 0;
  if (!is_narrow(t)) return 0;
  auto const unsigned_of = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  auto const elements = unsigned_of(t.spatial) | (t.samples > 1 ? unsigned_of(t.stride_n) : 0) |
                        (t.channels > 1 ? unsigned_of(t.stride_c) : 0);
  auto const all = elements * sizeof(T) | reinterpret_cast<std::uintptr_t>(t.data) | 16u;
  int const bytes = 1 << std::countr_zero(all), size = static_cast<int>(sizeof(T));
  return bytes == 16 || (size == 2 && bytes == 8) ? bytes : size;
}

/// By how many elements the positions of all samples of `t` follow each other; 0: it takes two strides to find them.
template <class T>
[[nodiscard]] constexpr std::int64_t step_of_all(tensor_view<T> const& t) {
  if (t.spatial == 1) return t.stride_n;
  return t.samples == 1 || t.stride_n == t.spatial * t.stride_s ? t.stride_s : 0;
}

/// Takes tensors along channels, where they have no masks and all samples follow each other, as ones of one sample, whose packs are found
/// by one stride.
template <class... Ops>
void flatten(Ops&... ops) {
  auto const is_flat = [](auto const& op) {
    if (axis_of(op.lead()) != axis::channels || op.mask.data != nullptr || op.lead().size() == 0) return false;
    return std::remove_cvref_t<decltype(op)>::each_tensor(op, [](auto const& t) {
      auto const step = step_of_all(t);
      return step != 0 && step != 1;
    });
  };
  if (!(is_flat(ops) && ...)) return;
  auto const of_one_sample = [](auto& t) {
    t.stride_s = step_of_all(t), t.spatial *= t.samples;
    t.samples = 1, t.stride_n = 0;
    return true;
  };
  (void)(Ops::each_tensor(ops, of_one_sample) && ...);
}

/// The positions of a row where rows can be columns: of 8 samples or more, each contiguous and of whole packs, without a mask; else 1.
template <class Op>
[[nodiscard]] std::int64_t columns_of(Op const& op) {
  constexpr std::int64_t length = pack_length<typename Op::element_type>;
  auto const& lead = op.lead();
  if (axis_of(lead) != axis::positions || op.mask.data != nullptr || lead.samples < 8 || lead.size() == 0) return 1;
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  if (!is_narrow(lead) || lead.channels * lead.spatial >= limit || lead.channels * lead.spatial % length != 0) return 1;
  auto const is_dense = [&](auto const& t) {
    return t.stride_s == 1 && t.stride_c == t.spatial && t.stride_n >= t.channels * t.spatial &&
           t.stride_n % length == 0 && is_narrow(t) && is_aligned(t.data);
  };
  return Op::each_tensor(op, is_dense) ? lead.spatial : 1;
}

/// Takes rows as columns, `[N, C, S]` as `[N, C·S]` along channels, whose packs are whole.
template <class Op>
void take_columns(Op& op) {
  (void)Op::each_tensor(op, [](auto& t) {
    t.channels *= t.spatial;
    t.spatial = t.stride_c = 1;
    return true;
  });
}

/// Packs side by side in which channels of `columns` columns each are there in full, with packs for three quarters of the threads of a
/// block; 0: there are none. Of `all` columns, more where groups would be more than a wave of blocks, up to as many channels as a line
/// of the cache has elements.
template <class T>
[[nodiscard]] int lanes_of_channels(std::int64_t columns, std::int64_t all, int threads, std::int64_t wave) {
  constexpr std::int64_t length = pack_length<T>;
  auto const is_filled = [&](std::int64_t lanes) { return 4 * (threads / lanes * lanes) >= 3 * threads; };
  std::int64_t lanes = columns / std::gcd(length, columns);
  if (!is_filled(lanes)) return 0;
  while (up_to(all, lanes * length) > wave && is_filled(2 * lanes) && 2 * lanes <= line_lanes * columns) lanes *= 2;
  return static_cast<int>(lanes);
}

/// Whether every pack of `op` is there in full, and one access of each tensor and of the mask, and an address is had in 31 bits. Along
/// channels there is no mask, and one sample.
template <class Op>
[[nodiscard]] bool is_whole_throughout(Op const& op) {
  using T = typename Op::element_type;
  auto const& lead = op.lead();
  bool const rows = axis_of(lead) == axis::positions;
  if (!Op::each_tensor(op, [](auto const& t) { return is_narrow(t); })) return false;
  if (!is_aligned_throughout(op) || (rows ? lead.spatial : lead.channels) % pack_length<T> != 0) return false;
  if (!rows) return lead.samples == 1 && op.mask.data == nullptr;
  spot const first{0, 0, 0, {}}, next_sample{lead.samples > 1 ? 1 : 0, 0, 0, {}},
      next_row{0, 0, lead.channels > 1 ? 1 : 0, {}};
  for (auto const& at : {first, next_sample, next_row})
    if (!is_aligned(address(lead, at)) || !is_one_access<axis::positions, T>(op.mask, at)) return false;
  return true;
}

/// Whether any 16 bytes of memory in which a row of some tensor begins or ends are that tensor's, but for those where its first row
/// begins and its last one ends. So it is where rows begin 16 bytes apart or more.
template <class Op>
[[nodiscard]] bool has_room_throughout(Op const& op) {
  using T = typename Op::element_type;
  return Op::each_tensor(op, [](auto const& t) {
    return (t.samples <= 1 || t.stride_n >= pack_length<T>)&&(t.channels <= 1 || t.stride_c >= pack_length<T>);
  });
}

/// What kernels may know of the packs of a launch.
template <class... Ops>
void set_access(geometry& cut, Ops const&... ops) {
  cut.whole = (is_whole_throughout(ops) && ...);
  cut.aligned =
      cut.whole ||
      ((axis_of(ops.lead()) == axis::positions && is_aligned_throughout(ops) && has_room_throughout(ops)) && ...);
}

/// Pieces of a group of a reduction at most, whose parts the last block puts together, and blocks of one that a multiprocessor
/// holds at most.
inline constexpr std::int64_t most_pieces = 256, most_resident = 6;

/// Doubles of a workspace in which the blocks of a reduction of several pieces leave their parts. Along channels there are at most as many
/// blocks as are resident, each of which leaves 5 numbers of 64 channels; along positions, where each leaves as many of one, there are no more
/// than there is room for. A group of one piece leaves nothing.
[[nodiscard]] constexpr std::int64_t room_for_parts(device_limits const& limits) {
  return most_resident * limits.multiprocessors * 5 * 64;
}

/// Blocks of `Op` that the device holds at a time, by the registers that they take.
template <class Op>
[[nodiscard]] std::int64_t wave_of(Op const& op, device_limits const& limits) {
  std::int64_t const resident = Op::resident[static_cast<int>(axis_of(op.lead()))];
  return std::max<std::int64_t>(1, std::min(resident, most_resident) * limits.multiprocessors);
}

/// Pieces of a group of a reduction along positions, up to `most`, of 16 packs a thread at least: as many as take the least time, by a model of
/// what was measured on an H200. A wave of blocks takes as long as a thread has packs, or 0.7 of it if fewer blocks share the memory; to
/// begin one, and to put pieces together, takes as long as 6 packs each.
[[nodiscard]] constexpr std::int64_t pieces_of_rows(std::int64_t items, std::int64_t groups, std::int64_t threads,
                                                    std::int64_t wave, std::int64_t most) {
  std::int64_t const some = std::max<std::int64_t>(1, groups);
  most = std::max<std::int64_t>(1, std::min(most, up_to(items, 16 * threads)));
  auto const cost = [&](std::int64_t pieces) {
    auto const real = [](std::int64_t value) { return static_cast<double>(value); };
    std::int64_t const blocks = some * pieces, rest = blocks % wave;
    double const waves = real(blocks / wave) + (rest == 0 ? 0 : std::max(0.7, real(rest) / real(wave)));
    return waves * real(items) / real(threads * pieces) + 6 * real(up_to(blocks, wave) + (pieces > 1 ? 1 : 0));
  };
  std::int64_t best = 1;
  auto const consider = [&](std::int64_t pieces) {
    pieces = std::clamp<std::int64_t>(pieces, 1, most);
    if (cost(pieces) < cost(best)) best = pieces;
  };
  for (std::int64_t pieces = 2; pieces <= 4; ++pieces) consider(pieces);
  for (std::int64_t waves = 1; waves <= 4; ++waves) consider(waves * wave / some);
  return best;
}

/// Pieces of a group of a reduction along positions for whose parts a workspace has room.
template <class Op>
[[nodiscard]] std::int64_t most_pieces_of_rows(std::int64_t groups, device_limits const& limits) {
  std::int64_t const parts = Op::parts * std::max<std::int64_t>(1, groups);
  return std::clamp<std::int64_t>(room_for_parts(limits) / parts, 1, most_pieces);
}

/// Cuts tensors of which `columns` channels are one of the layer. Along channels, a reduction is one wave of blocks, each with as many
/// packs as it takes: what the blocks leave to be put together is a table of pieces × channels. Along positions it is a number for each piece.
template <class Op>
[[nodiscard]] geometry cut_for_reduction(Op const& op, std::int64_t columns, int threads, device_limits const& limits) {
  using T = typename Op::element_type;
  std::int64_t const wave = wave_of(op, limits);
  bool const along_channels = axis_of(op.lead()) == axis::channels;
  int const lanes = columns == 1 ? lanes_of_lines(op.lead(), line_lanes)
                                 : lanes_of_channels<T>(columns, op.lead().channels, threads, wave);
  auto cut = cut_tensor(op.lead(), threads, along_channels ? wave : 0, 16, most_pieces, lanes);
  if (!along_channels) {
    auto const pieces =
        pieces_of_rows(cut.items(), cut.groups, cut.threads, wave, most_pieces_of_rows<Op>(cut.groups, limits));
    cut = cut_tensor(op.lead(), threads, pieces * cut.groups, 1, most_pieces, lanes);
  }
  cut.columns = columns;
  set_access(cut, op);
  return cut;
}

/// Packs along channels that a block of a map takes side by side at most: a thread makes the coefficients of one channel.
template <class T>
[[nodiscard]] constexpr int map_lanes(int threads) {
  return std::min(most_map_lanes, threads / pack_length<T>);
}

/// The same of a map, whose blocks do not wait for each other: each of 8 packs a thread, 32 KB for each tensor, or 16 of columns, for all of
/// which there are coefficients to make. Along channels, where each block has those of many channels to make, they are fewer of smaller tensors: one
/// wave, all of which have fetched their first packs before the packet is there, or four.
template <class Op>
[[nodiscard]] geometry cut_for_map(Op const& op, std::int64_t columns, int threads, device_limits const& limits) {
  using T = typename Op::element_type;
  std::int64_t const wave = wave_of(op, limits), packs = op.lead().size() / pack_length<T>,
                     of_thread = packs / (wave * threads);
  constexpr std::int64_t few = Op::inputs == 1 ? 64 : 32;
  bool const along_channels = axis_of(op.lead()) == axis::channels;
  std::int64_t const blocks = !along_channels || of_thread > 2 * few ? packs : of_thread > few ? 4 * wave : wave;
  auto cut = cut_tensor(op.lead(), threads, blocks, columns == 1 ? 8 : 16, std::int64_t{1} << 20,
                        lanes_of_lines(op.lead(), map_lanes<T>(threads)), Op::unroll);
  cut.columns = columns;
  set_access(cut, op);
  return cut;
}

/// Whether a device of `architecture` is sure to run code that knows of clusters, where there is code for those that are `Compiled`. Of
/// its own generation it takes what is not after it; of others intermediate code, and nobody says of which there is any.
template <int... Compiled>
[[nodiscard]] constexpr bool runs_clusters(int architecture) {
  bool runs = false, of_its_own = false, all_have = true;
  for (int const compiled : {Compiled...}) {
    bool const is_later = compiled > architecture;
    runs = runs || !is_later;
    of_its_own = of_its_own || (!is_later && compiled / 100 == architecture / 100);
    all_have = all_have && compiled >= 900;
  }
  return architecture >= 900 && runs && (of_its_own || all_have);
}

/// Blocks of `accept_kernel`: one for the header, and, of moments, one for each `threads` channels.
[[nodiscard]] constexpr std::uint32_t accept_blocks(reduced_packets const& of, int threads) {
  return 1 + (of.weighted == nullptr ? 0 : static_cast<std::uint32_t>(up_to(of.channels, threads)));
}

/// Where in a workspace a launch of C channels finds what is its own.
struct workspace_layout {
  std::uint32_t* tickets;     ///< of groups
  std::uint32_t* pass_ticket; ///< of forward_statistics
  double* partials;

  [[nodiscard]] static constexpr std::size_t ticket_bytes(std::int64_t channels) {
    return static_cast<std::size_t>(up_to(channels + 1, 4)) * 16;
  }
  workspace_layout(workspace const& work, std::int64_t channels)
      : tickets{static_cast<std::uint32_t*>(work.data)}, pass_ticket{tickets + channels},
        partials{reinterpret_cast<double*>(static_cast<std::byte*>(work.data) + ticket_bytes(channels))} {}
};

} // namespace syncnorm::cuda::detail
