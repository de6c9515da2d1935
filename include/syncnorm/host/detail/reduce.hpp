#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// The sums of a group among those of so many channels over each group of pieces, `[parts.count, Sums, channels]`.
template <std::size_t Sums>
[[nodiscard]] sums_of_channels<Sums> sums_of_group(double* of_groups, std::int64_t channels, std::int64_t group) {
  return consecutive_sums<Sums>(of_groups + group * static_cast<std::int64_t>(Sums) * channels, channels);
}

/// Folds such sums into those over all, in order, but for groups of which no element counts. `merge` as the kernel's of
/// `reduce_channels`.
template <std::size_t Sums, class Parts, class Merge>
void merge_groups(Parts const& parts, std::int64_t channels, double* of_groups, Merge const& merge,
                  sums_of_channels<Sums> const& to) {
  auto const first = sums_of_group<Sums>(of_groups, channels, 0);
  for (std::size_t j = 0; j < Sums; ++j) std::copy_n(first[j], channels, to[j]);
  std::int64_t before = parts.elements(0);
  for (std::int64_t g = 1; g < parts.count; ++g) {
    std::int64_t const more = parts.elements(g);
    if (more == 0) continue;
    merge(before, more, to, sums_of_group<Sums>(of_groups, channels, g), channels);
    before += more;
  }
}

/// Computes some sums per channel. `Kernel` has
///
///     static constexpr std::size_t sum_count;        how many
///     kernel(first, length, group, to)        those of channels [first, first + length) over one group of pieces
///     kernel.merge(before, more, to, from, length)   folds those of the next group in
///
/// where `before` and `more` count the elements of a channel. Groups fold in order, on whatever thread, but for those of
/// which no element counts. `parts` are the groups, masked ones perhaps.
template <class A, class Parts, class Kernel>
void reduce_channels(executor_ref exec, Parts const& parts, std::int64_t channels, std::int64_t chunk,
                     Kernel const& kernel, sums_of_channels<Kernel::sum_count> const& out) {
  constexpr std::size_t sums = Kernel::sum_count;
  constexpr std::int64_t most = chunk_channels<A>;
  if (channels == 0) return;
  if (parts.count == 0) {
    for (double* const each : out) std::fill_n(each, channels, 0.0);
    return;
  }
  chunk = even_part(channels, std::min(chunk, most));
  std::int64_t const chunks = ceil_div(channels, chunk);

  constexpr std::int64_t worth_sharing = 1 << 14;
  bool const small = channels * parts.pieces * parts.cut.length <= worth_sharing;
  if (small || exec.concurrency() == 1 || parts.count == 1 || chunks >= 4 * exec.concurrency()) {
    exec.for_each(chunks, [&](std::int64_t i) {
      std::int64_t const first = i * chunk, length = std::min(chunk, channels - first);
      auto const to = from_channel(out, first);
      kernel(first, length, 0, to);
      if (parts.count == 1) return;
      std::array<double, sums* static_cast<std::size_t>(most)> of_next;
      auto const next = consecutive_sums<sums>(of_next.data(), most);
      std::int64_t before = parts.elements(0);
      for (std::int64_t g = 1; g < parts.count; ++g) {
        std::int64_t const more = parts.elements(g);
        if (more == 0) continue;
        kernel(first, length, g, next);
        kernel.merge(before, more, to, next, length);
        before += more;
      }
    });
    return;
  }

  scratch_lease<double> partials{parts.count * static_cast<std::int64_t>(sums) * channels};
  exec.for_each(chunks * parts.count, [&](std::int64_t i) {
    std::int64_t const g = i / chunks, first = i % chunks * chunk;
    kernel(first, std::min(chunk, channels - first), g,
           from_channel(sums_of_group<sums>(partials.data(), channels, g), first));
  });
  merge_groups(
      parts, channels, partials.data(), [&](auto const&... merged) { kernel.merge(merged...); }, out);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
