#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <span>

#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::detail {

/// Differences of two indices, between `above` and `below`, and what each step of one is in memory.
struct difference {
  std::int64_t stride, above, below;

  /// As far as they come to at most, in either direction.
  [[nodiscard]] std::int64_t reach() const { return std::abs(stride) * std::max(-above - 1, below - 1); }
};

/// As far as all of them come to at most.
[[nodiscard]] inline std::int64_t reach_of(std::span<difference const> all) {
  std::int64_t reach = 0;
  for (auto const& each : all) reach += each.reach();
  return reach;
}

/// What each step in memory is a multiple of; 0 where there is none.
[[nodiscard]] inline std::int64_t divisor_of(std::span<difference const> all) {
  std::int64_t divisor = 0;
  for (auto const& each : all) divisor = std::gcd(divisor, each.stride);
  return divisor;
}

/// Whether some differences come to `distance`, as far as `tries` of them go. Of each that are tried, the others can make up for the
/// rest.
[[nodiscard]] inline bool comes_to(std::int64_t distance, std::span<difference const> of, std::int64_t& tries) {
  if (of.empty()) return distance == 0;
  auto const [stride, above, below] = of.front();
  auto const others = of.subspan(1);
  if (stride == 0) return comes_to(distance, others, tries);
  if (distance % divisor_of(of) != 0) return false;
  std::int64_t const rest = reach_of(others), step = std::abs(stride), sign = stride < 0 ? -1 : 1;
  // i·step is within `rest` of `distance`, and sign·i a difference of indices.
  std::int64_t const middle = distance / step, margin = rest / step + 1;
  std::int64_t const least = sign > 0 ? above + 1 : 1 - below, most = sign > 0 ? below - 1 : -above - 1;
  for (std::int64_t i = std::max(middle - margin, least); i <= std::min(middle + margin, most) && tries > 0;
       ++i, --tries)
    if (comes_to(distance - i * step, others, tries)) return true;
  return false;
}
[[nodiscard]] inline bool comes_to(std::int64_t distance, std::span<difference const> of) {
  auto tries = std::numeric_limits<std::int64_t>::max();
  return comes_to(distance, of, tries);
}

template <std::size_t N>
[[nodiscard]] std::array<difference, N> from_the_largest(std::array<difference, N> all) {
  std::ranges::sort(all, std::ranges::greater{}, [](difference const& each) { return std::abs(each.stride); });
  return all;
}

/// Differences of an index of `a` to one of `b`, whose strides are equal, but that an extent of 1 has none; from the largest to the
/// smallest.
template <class T>
[[nodiscard]] std::array<difference, 3> differences_of(tensor_view<T> const& a, tensor_view<T> const& b) {
  auto const of = [](std::int64_t one, std::int64_t other, std::int64_t stride, std::int64_t other_stride) {
    return difference{one > 1 ? stride : other > 1 ? other_stride : 0, -other, one};
  };
  return from_the_largest(std::array{of(a.samples, b.samples, a.stride_n, b.stride_n),
                                     of(a.channels, b.channels, a.stride_c, b.stride_c),
                                     of(a.spatial, b.spatial, a.stride_s, b.stride_s)});
}

/// The indices of `a` and those of `b`, which count backwards, whatever their strides.
template <class T>
[[nodiscard]] std::array<difference, 6> indices_of(tensor_view<T> const& a, tensor_view<T> const& b) {
  auto const up = [](std::int64_t extent, std::int64_t stride) {
    return difference{extent > 1 ? stride : 0, -1, extent};
  };
  auto const down = [](std::int64_t extent, std::int64_t stride) {
    return difference{extent > 1 ? stride : 0, -extent, 1};
  };
  return from_the_largest(std::array{up(a.samples, a.stride_n), up(a.channels, a.stride_c), up(a.spatial, a.stride_s),
                                     down(b.samples, b.stride_n), down(b.channels, b.stride_c),
                                     down(b.spatial, b.stride_s)});
}

/// Whether two indices of a view are one place in memory.
template <class T>
[[nodiscard]] bool overlaps_itself(tensor_view<T> const& x) {
  if (x.size() <= 1) return false;
  auto const all = differences_of(x, x);
  for (std::size_t k = 0; k < all.size(); ++k) {
    auto const others = std::span{all}.subspan(k + 1);
    std::int64_t const step = std::abs(all[k].stride), rest = reach_of(others);
    for (std::int64_t i = 1; i < all[k].below && i * step <= rest; ++i)
      if (comes_to(i * step, others)) return true;
  }
  return false;
}

/// What there is to know of where two views are in memory.
enum class placement {
  apart,       ///< no element of one is one of the other
  overlapping, ///< some is
  unknown      ///< they span the same memory by other strides, with gaps, and too many elements to be looked at
};

template <class T>
[[nodiscard]] placement place(tensor_view<T const> const& a, tensor_view<T const> const& b) {
  if (a.data == nullptr || b.data == nullptr || a.size() <= 0 || b.size() <= 0) return placement::apart;
  // Strides may be negative.
  auto const reach = [](auto const& view, auto const& farther) {
    return farther(std::int64_t{0}, (view.samples - 1) * view.stride_n) +
           farther(std::int64_t{0}, (view.channels - 1) * view.stride_c) +
           farther(std::int64_t{0}, (view.spatial - 1) * view.stride_s);
  };
  auto const begin = [&](auto const& view) {
    return reinterpret_cast<std::uintptr_t>(view.data + reach(view, std::ranges::min));
  };
  auto const end = [&](auto const& view) {
    return reinterpret_cast<std::uintptr_t>(view.data + reach(view, std::ranges::max) + 1);
  };
  if (begin(a) >= end(b) || begin(b) >= end(a)) return placement::apart;
  auto const differ = [](std::int64_t one, std::int64_t other, std::int64_t stride, std::int64_t other_stride) {
    return one > 1 && other > 1 && stride != other_stride;
  };
  if (differ(a.samples, b.samples, a.stride_n, b.stride_n) || differ(a.channels, b.channels, a.stride_c, b.stride_c) ||
      differ(a.spatial, b.spatial, a.stride_s, b.stride_s)) {
    auto const is_dense = [&](auto const& view) {
      return (view.samples == 1 || view.stride_n != 0) && (view.channels == 1 || view.stride_c != 0) &&
             (view.spatial == 1 || view.stride_s != 0) &&
             end(view) - begin(view) == static_cast<std::uintptr_t>(view.size()) * sizeof(T);
    };
    if (is_dense(a) && is_dense(b)) return placement::overlapping;
    std::int64_t tries = 1 << 14; // some 0.1 ms
    if (comes_to(b.data - a.data, indices_of(a, b), tries)) return placement::overlapping;
    return tries > 0 ? placement::apart : placement::unknown;
  }
  // Whether some b[n, c, s] is a[n + i, c + j, s + k].
  auto const all = differences_of(a, b);
  return comes_to(b.data - a.data, all) ? placement::overlapping : placement::apart;
}

/// Whether two views may have a place in memory in common.
template <class T>
[[nodiscard]] bool overlap(tensor_view<T const> const& a, tensor_view<T const> const& b) {
  return place(a, b) != placement::apart;
}

/// Whether each element of one is the same of the other.
template <class T>
[[nodiscard]] bool are_same(tensor_view<T const> const& a, tensor_view<T const> const& b) {
  auto const agree = [](std::int64_t one, std::int64_t other, std::int64_t stride, std::int64_t other_stride) {
    return one == other && (one <= 1 || stride == other_stride);
  };
  return a.data == b.data && agree(a.samples, b.samples, a.stride_n, b.stride_n) &&
         agree(a.channels, b.channels, a.stride_c, b.stride_c) && agree(a.spatial, b.spatial, a.stride_s, b.stride_s);
}

} // namespace syncnorm::detail
