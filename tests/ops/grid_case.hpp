#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <syncnorm/core/tensor_view.hpp>

#include <support/noise.hpp>

namespace test {

enum class partition { even, uneven, with_empty_ranks };
enum class layout { nchw, nhwc, nc, tbc, strided, csn, cns };

inline constexpr std::array partitions{partition::even, partition::uneven, partition::with_empty_ranks};
inline constexpr std::array layouts{layout::nchw, layout::nhwc, layout::nc, layout::tbc, layout::strided};
/// Those with channels outermost, as a matrix by columns.
inline constexpr std::array layouts_by_channels{layout::csn, layout::cns};

/// One cell of the test grid: how a batch is spread over ranks, and how it lies in memory.
struct grid_case {
  int ranks = 1;
  std::int64_t channels = 1, batch = 1, spatial = 1;
  partition spread = partition::even;
  layout order = layout::nchw;

  [[nodiscard]] std::int64_t samples_of(int rank) const {
    switch (spread) {
    case partition::even:
      return batch;
    case partition::uneven:
      return batch + rank;
    case partition::with_empty_ranks:
      return ranks > 1 && rank % 2 == 0 ? 0 : batch;
    }
    return 0;
  }
  [[nodiscard]] std::int64_t first_sample_of(int rank) const {
    std::int64_t first = 0;
    for (int r = 0; r < rank; ++r) first += samples_of(r);
    return first;
  }
  [[nodiscard]] std::int64_t samples() const { return first_sample_of(ranks); }

  [[nodiscard]] std::string name() const {
    static constexpr std::array spreads{"even", "uneven", "empty ranks"};
    static constexpr std::array orders{"nchw", "nhwc", "nc", "tbc", "strided", "csn", "cns"};
    return std::to_string(ranks) + " ranks, C " + std::to_string(channels) + ", batch " + std::to_string(batch) +
           ", S " + std::to_string(spatial) + ", " + spreads[static_cast<std::size_t>(spread)] + ", " +
           orders[static_cast<std::size_t>(order)];
  }
};

/// A tensor that owns its elements and lies in memory as a layout says.
template <class T>
struct owned_tensor {
  std::vector<T> storage;
  syncnorm::tensor_view<T> view;

  owned_tensor(layout order, std::int64_t n, std::int64_t c, std::int64_t s) {
    // The strided form leaves gaps everywhere and starts off the alignment of a vector.
    auto const room = order == layout::strided ? (n + 1) * (c + 1) * (2 * s + 1) + 1 : n * c * s;
    storage.assign(static_cast<std::size_t>(room), static_cast<T>(-77.0F));
    T* data = storage.data();
    switch (order) {
    case layout::nchw:
      view = syncnorm::nchw(data, n, c, s);
      break;
    case layout::nhwc:
      view = syncnorm::nhwc(data, n, c, s);
      break;
    case layout::nc:
      view = s == 1 ? syncnorm::nc(data, n, c) : syncnorm::nchw(data, n, c, s);
      break;
    case layout::tbc:
      view = syncnorm::tbc(data, s, n, c);
      break;
    case layout::strided:
      view = {data + 1, n, c, s, (c + 1) * (2 * s + 1), 2 * s + 1, 2};
      break;
    case layout::csn:
      view = {data, n, c, s, 1, n * s, n};
      break;
    case layout::cns:
      view = {data, n, c, s, s, n * s, 1};
      break;
    }
  }
  owned_tensor(owned_tensor const&) = delete;
  owned_tensor& operator=(owned_tensor const&) = delete;
};

} // namespace test
