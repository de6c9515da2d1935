#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <syncnorm/core/element.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/repeat.hpp>
#include <syncnorm/host/detail/simd.hpp>

// What an elementwise_map multiplies vector `i` of a run of elements by, get(i), and which of its lanes count, counted(i).
namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Of one channel, at consecutive positions.
template <class T, std::size_t Count, bool Masked>
struct channel_coefficients {
  using A = accumulate_t<T>;
  static constexpr int L = native_lanes<A>;
  std::array<vector_t<A, L>, Count> values;
  std::uint8_t const* mask;

  /// Coefficient j at table[j·step]. `of`: the mask at the first element.
  [[gnu::always_inline]] channel_coefficients(A const* table, std::int64_t step, std::uint8_t const* of) : mask{of} {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < Count; ++j) values[j] = splat<A, L>(table[static_cast<std::int64_t>(j) * step]);
  }
  [[gnu::always_inline]] auto const& get(std::int64_t) const { return values; }
  [[gnu::always_inline]] auto counted(std::int64_t i) const {
    if constexpr (Masked)
      return counted_lanes<A, L>(mask + i);
    else
      return every_lane{};
  }
  /// Of the vectors of `load_pair`.
  [[gnu::always_inline]] auto counted_of_pair(std::int64_t i) const {
    if constexpr (Masked)
      return counted_pair<T, L>(mask + i);
    else
      return std::array<every_lane, 2>{};
  }
  /// Of the first `count` lanes; the mask may end there.
  [[nodiscard]] auto first_counted(std::int64_t count) const {
    if constexpr (Masked) {
      std::array<std::uint8_t, static_cast<std::size_t>(L)> bytes{};
      std::copy_n(mask, count, bytes.data());
      return counted_lanes<A, L>(bytes.data());
    } else {
      return every_lane{};
    }
  }
};

/// Which lanes of a run of consecutive channels count: 1 or 0 of each, for `lane_coefficients`.
template <class A, bool Masked>
class lane_counts {
  static constexpr int L = native_lanes<A>;
  // A run is no longer than a chunk and a position or a short row, of which the last vector may end beyond it.
  std::array<A, static_cast<std::size_t>(Masked ? 2 * chunk_channels<A> + L : 1)> values_{};

public:
  /// At one position.
  [[nodiscard]] A const* of_one(std::uint8_t const* mask) {
    put(0, mask);
    return values_.data();
  }
  /// At several, one after the other.
  [[nodiscard]] A const* of_several(std::uint8_t const* mask, std::int64_t positions, std::int64_t channels) {
    for (std::int64_t p = 0; p < positions; ++p)
      for (std::int64_t c = 0; c < channels; c += L) put(p * channels + c, mask + p);
    return values_.data();
  }

  /// Of rows of `spatial` positions, one after the other, from position `first` on.
  [[nodiscard]] A const* of_rows(std::uint8_t const* mask, std::int64_t spatial, std::int64_t first,
                                 std::int64_t lanes) {
    auto const count = [](std::uint8_t byte) { return byte != 0 ? A{1} : A{0}; };
    A* const begins = std::transform(mask + first, mask + spatial, values_.data(), count);
    std::transform(mask, mask + first, begins, count);
    repeat(values_.data(), spatial, lanes);
    return values_.data();
  }

private:
  void put(std::int64_t lane, std::uint8_t const* mask) {
    store<L>(values_.data() + lane, splat<A, L>(*mask != 0 ? A{1} : A{0}));
  }
};

/// Of consecutive channels, at one position or several.
template <class T, std::size_t Count, bool Masked>
struct lane_coefficients {
  using A = accumulate_t<T>;
  static constexpr int L = native_lanes<A>;
  A const* table; ///< coefficient j of lane i at j·step + i
  std::int64_t step;
  A const* counts;     ///< 1 or 0 of lane i at i·spread
  std::int64_t spread; ///< 0: the same of all, at `L` places

  [[gnu::always_inline]] auto get(std::int64_t i) const {
    std::array<vector_t<A, L>, Count> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < Count; ++j) v[j] = load<L>(table + static_cast<std::int64_t>(j) * step + i);
    return v;
  }
  [[gnu::always_inline]] auto counted(std::int64_t i) const {
    if constexpr (Masked)
      return load<L>(counts + i * spread) > vector_t<A, L>{};
    else
      return every_lane{};
  }
  [[nodiscard]] auto first_counted(std::int64_t) const { return counted(0); }
};

/// Of one channel before element 0, and of the next from there on.
template <class T, std::size_t Count, bool Masked>
struct seam_coefficients {
  using A = accumulate_t<T>;
  static constexpr int L = native_lanes<A>;
  channel_coefficients<T, Count, false> before;
  channel_coefficients<T, Count, Masked> const& after;
  std::array<std::uint8_t, static_cast<std::size_t>(Masked ? 2 * line_elements<T> : 1)> mask;

  /// `row`: the mask of a row of `length` positions, at least as many as a line of the cache has, which both channels have.
  [[gnu::always_inline]] seam_coefficients(A const* table_before, std::int64_t step,
                                           channel_coefficients<T, Count, Masked> const& k, std::uint8_t const* row,
                                           std::int64_t length)
      : before{table_before, step, nullptr}, after{k} {
    if constexpr (Masked) {
      std::memcpy(mask.data(), row + length - line_elements<T>, line_elements<T>);
      std::memcpy(mask.data() + line_elements<T>, row, line_elements<T>);
    }
  }

  [[gnu::always_inline]] auto get(std::int64_t i) const {
    std::array<vector_t<A, L>, Count> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < Count; ++j) v[j] = first_lanes<A, L>(before.values[j], after.values[j], -i);
    return v;
  }
  [[gnu::always_inline]] auto counted([[maybe_unused]] std::int64_t i) const {
    if constexpr (Masked)
      return counted_lanes<A, L>(mask.data() + line_elements<T> + i);
    else
      return every_lane{};
  }
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
