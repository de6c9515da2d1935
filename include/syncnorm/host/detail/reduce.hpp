#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Folds the two sums of so many channels over each group of pieces, `[parts.count, 2, channels]`, into those over all, in order, but for
/// groups of which no element counts. `merge` as the kernel's of `reduce_channels`.
template <class Parts, class Merge>
void merge_groups(Parts const& parts, std::int64_t channels, double const* of_groups, Merge const& merge, double* a,
                  double* b) {
  std::copy_n(of_groups, channels, a);
  std::copy_n(of_groups + channels, channels, b);
  std::int64_t before = parts.elements(0);
  for (std::int64_t g = 1; g < parts.count; ++g) {
    std::int64_t const more = parts.elements(g);
    if (more == 0) continue;
    double const* const of_group = of_groups + g * 2 * channels;
    merge(before, more, a, b, of_group, of_group + channels, channels);
    before += more;
  }
}

/// Computes two sums per channel. `Kernel` has
///
///     kernel(first, length, group, a, b)      the sums of channels [first, first + length) over one group of pieces
///     kernel.merge(before, more, a, b, a2, b2, length)   folds those of the next group in
///
/// where `before` and `more` count the elements of a channel. Groups fold in order, on whatever thread, but for those of
/// which no element counts. `parts` are the groups, masked ones perhaps.
template <class A, class Parts, class Kernel>
void reduce_channels(executor_ref exec, Parts const& parts, std::int64_t channels, std::int64_t chunk,
                     Kernel const& kernel, std::span<double> out_a, std::span<double> out_b) {
  constexpr std::int64_t most = chunk_channels<A>;
  if (channels == 0) return;
  if (parts.count == 0) {
    std::ranges::fill(out_a, 0.0);
    std::ranges::fill(out_b, 0.0);
    return;
  }
  chunk = even_part(channels, std::min(chunk, most));
  std::int64_t const chunks = ceil_div(channels, chunk);

  constexpr std::int64_t worth_sharing = 1 << 14;
  bool const small = channels * parts.pieces * parts.cut.length <= worth_sharing;
  if (small || exec.concurrency() == 1 || parts.count == 1 || chunks >= 4 * exec.concurrency()) {
    exec.for_each(chunks, [&](std::int64_t i) {
      std::int64_t const first = i * chunk, length = std::min(chunk, channels - first);
      double* const a = out_a.data() + first;
      double* const b = out_b.data() + first;
      kernel(first, length, 0, a, b);
      if (parts.count == 1) return;
      std::array<double, static_cast<std::size_t>(most)> next_a, next_b;
      std::int64_t before = parts.elements(0);
      for (std::int64_t g = 1; g < parts.count; ++g) {
        std::int64_t const more = parts.elements(g);
        if (more == 0) continue;
        kernel(first, length, g, next_a.data(), next_b.data());
        kernel.merge(before, more, a, b, next_a.data(), next_b.data(), length);
        before += more;
      }
    });
    return;
  }

  std::int64_t const width = 2 * channels;
  scratch_lease<double> partials{parts.count * width};
  exec.for_each(chunks * parts.count, [&](std::int64_t i) {
    std::int64_t const g = i / chunks, first = i % chunks * chunk;
    double* const a = partials.data() + g * width + first;
    kernel(first, std::min(chunk, channels - first), g, a, a + channels);
  });
  merge_groups(
      parts, channels, partials.data(), [&](auto const&... sums) { kernel.merge(sums...); }, out_a.data(),
      out_b.data());
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
