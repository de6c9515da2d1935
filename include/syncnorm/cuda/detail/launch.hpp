#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/cuda/detail/entries.hpp>
#include <syncnorm/cuda/detail/epilogue_math.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/operands.hpp>

// Launches of the kernels of entries.hpp by `Kernels`, which has
//
//     bool has_clusters(int architecture)                 whether what such a device runs of them knows of clusters
//     int threads(int on_gpu)                             the threads of a block that has so many on a GPU
//     cudaError_t launch<Entry>(shape, arguments, stream)
//     cudaError_t load<Entry>()                           on the current device
//
// What fails is thrown as a failure of `call`.
namespace syncnorm::cuda::detail {

struct launch_shape {
  std::uint32_t blocks = 1;
  int threads = 64;
  int dynamic_shared = 0;      ///< bytes
  int most_dynamic_shared = 0; ///< of any launch of the kernel on this device
  int static_shared = 0;       ///< bytes beside those that are dynamic
  int cluster = 1;             ///< blocks of a cluster
  bool early = false;          ///< begins before the kernel before has ended, for which it waits itself
};

template <class Kernels, class Entry>
void launch(char const* call, launch_shape const& shape, typename Entry::arguments const& a, cudaStream_t stream) {
  syncnorm::detail::require_cuda(Kernels::template launch<Entry>(shape, a, stream), call);
}

/// f(axis) of the packs of `op`, as the constant for which kernels are compiled.
template <class Op, class F>
void along_packs(Op const& op, F const& f) {
  if (axis_of(op.lead()) == axis::positions)
    f(std::integral_constant<axis, axis::positions>{});
  else
    f(std::integral_constant<axis, axis::channels>{});
}

template <class Kernels, class Op>
void launch_reduction(char const* call, Op const& op, packet_header const& header, packet_place const& packet,
                      workspace const& work, device_limits const& limits, cudaStream_t stream) {
  auto const a = make_reduction(op, header, packet, work, limits, Kernels::threads(op.threads));
  along_packs(a.op, [&](auto along) {
    using entry = reduce_entry<Op, along()>;
    launch_shape shape{std::max(1u, a.cut.blocks()), a.cut.threads};
    shape.static_shared = entry::static_shared;
    shape.dynamic_shared = unit_bytes(a.op, a.cut);
    shape.most_dynamic_shared = limits.shared_per_block - entry::static_shared;
    launch<Kernels, entry>(call, shape, a, stream);
  });
}

/// `early`: the kernel before is the reduction whose packet this one merges.
template <class Kernels, class Op>
void launch_map(char const* call, Op const& op, device_limits const& limits, cudaStream_t stream, bool early = false) {
  auto const a = make_map(op, limits, Kernels::threads(op.threads));
  along_packs(a.op, [&](auto along) {
    using entry = map_entry<Op, along()>;
    launch_shape shape{std::max(1u, a.cut.blocks()), a.cut.threads};
    shape.early = early && Kernels::has_clusters(limits.architecture);
    shape.static_shared = entry::static_shared;
    shape.dynamic_shared = stream_bytes<Op>(a.cut);
    shape.most_dynamic_shared = limits.shared_per_block - entry::static_shared;
    launch<Kernels, entry>(call, shape, a, stream);
  });
}

/// The limits of the device by what it runs of `Kernels`.
template <class Kernels>
[[nodiscard]] device_limits limits_of(device_limits limits) {
  if (!Kernels::has_clusters(limits.architecture)) limits.cluster_blocks = 1;
  return limits;
}

/// Whether `fits_on_chip`; of a header with a fault the header alone is to be written, which one launch does not.
template <class Kernels, class Map, class Sums>
[[nodiscard]] bool is_one_launch(Sums const& sums, packet_header const& header, device_limits const& limits) {
  bool const rows = axis_of(sums.lead()) == axis::positions;
  int const static_shared = rows ? fused_entry<Sums, Map, axis::positions>::static_shared
                                 : fused_entry<Sums, Map, axis::channels>::static_shared;
  return header.fault[0] == '\0' &&
         fits_on_chip(sums, Kernels::threads(fused_threads), static_shared, limits_of<Kernels>(limits));
}

/// A pass in one launch; the caller has asked `is_one_launch`.
template <class Kernels, class Sums, class Map>
void launch_fused(char const* call, Sums const& sums, Map const& map, packet_header const& header,
                  packet_place const& packet, device_limits const& limits, cudaStream_t stream) {
  auto const a = make_fused(sums, map, header, packet, limits_of<Kernels>(limits), Kernels::threads(fused_threads));
  along_packs(sums, [&](auto along) {
    using entry = fused_entry<Sums, Map, along()>;
    launch_shape const shape{a.cut.blocks(),
                             a.cut.threads,
                             static_cast<int>(kept_bytes(a.sums, a.cut)),
                             limits.shared_per_block - entry::static_shared,
                             entry::static_shared,
                             static_cast<int>(a.cut.pieces)};
    launch<Kernels, entry>(call, shape, a, stream);
  });
}

/// f(the epilogue's kind), as the constant for which kernels are compiled.
template <class T, class F>
auto with_kind(batch_norm_epilogue<T> const& epilogue, F const& f) {
  using enum epilogue_kind;
  if (!epilogue.does_something()) return f(std::integral_constant<epilogue_kind, none>{});
  if (epilogue.activation.exponential) return f(std::integral_constant<epilogue_kind, exponential>{});
  return f(std::integral_constant<epilogue_kind, linear>{});
}

/// f(whether the epilogue does something), as a constant, where its activation is not exponential.
template <class T, class F>
auto with_epilogue(batch_norm_epilogue<T> const& epilogue, F const& f) {
  return epilogue.does_something() ? f(std::true_type{}) : f(std::false_type{});
}

} // namespace syncnorm::cuda::detail
