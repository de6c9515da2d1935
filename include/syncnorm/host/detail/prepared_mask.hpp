#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>

namespace syncnorm::host::detail {

/// Eight bytes, of which the upper bit is that of `word` where its byte is not 0, and all others are 0.
[[nodiscard]] constexpr std::uint64_t nonzero_bytes(std::uint64_t word) {
  constexpr std::uint64_t low = 0x7f7f7f7f7f7f7f7f;
  return (((word & low) + low) | word) & ~low;
}

/// Whether no byte is 0.
[[nodiscard]] inline bool all_nonzero(std::uint8_t const* bytes, std::int64_t n) {
  constexpr std::int64_t at_once = 8;
  if (n < at_once) return std::all_of(bytes, bytes + n, [](std::uint8_t byte) { return byte != 0; });
  auto const all_from = [&](std::int64_t i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    return nonzero_bytes(word) == 0x8080808080808080;
  };
  for (std::int64_t i = 0; i + at_once < n; i += at_once)
    if (!all_from(i)) return false;
  return all_from(n - at_once);
}

/// How many of the bytes are not 0.
[[nodiscard]] inline std::int64_t count_nonzero(std::uint8_t const* bytes, std::int64_t n) {
  auto const count_in = [](std::uint64_t word) {
    return static_cast<std::int64_t>(((nonzero_bytes(word) >> 7) * 0x0101010101010101) >> 56);
  };
  std::int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    count += count_in(word);
  }
  std::uint64_t rest = 0;
  if (i < n) std::memcpy(&rest, bytes + i, static_cast<std::size_t>(n - i));
  return count + count_in(rest);
}

/// A mask as kernels take it: rows of contiguous bytes, and what there is to count in each piece and group of pieces.
class prepared_mask {
public:
  struct piece {
    std::int32_t first, last, counted; ///< all that count are in [first, last) of the piece
    /// Whether just these are.
    [[nodiscard]] bool contiguous() const { return last - first == counted; }
  };

  prepared_mask(mask_view const& mask, std::int64_t longest_piece)
      : parts_{mask.samples, mask.spatial, longest_piece}, rows_{mask},
        bytes_{is_dense(mask) ? 0 : mask.samples * mask.spatial}, pieces_{has_pieces() ? parts_.pieces : 0} {
    if (!is_dense(mask)) {
      rows_ = mask_of(bytes_.data(), mask.samples, mask.spatial);
      std::uint8_t* to = bytes_.data();
      for (std::int64_t n = 0; n < mask.samples; ++n)
        for (std::int64_t s = 0; s < mask.spatial; ++s) *to++ = mask(n, s) ? 1 : 0;
    }
    for (std::int64_t g = 0; g < parts_.count; ++g) {
      std::int64_t const counted =
          has_pieces() ? scan_pieces(g) : count_nonzero(row(parts_.begin(g)), parts_.elements(g));
      counted_[static_cast<std::size_t>(g)] = counted;
      total_ += counted;
    }
  }

  [[nodiscard]] groups const& parts() const { return parts_; }
  [[nodiscard]] std::uint8_t const* row(std::int64_t sample) const { return rows_.data + sample * rows_.stride_n; }
  /// Whether each row begins where the one before ends.
  [[nodiscard]] bool rows_follow() const { return rows_.samples == 1 || rows_.stride_n == rows_.spatial; }
  [[nodiscard]] piece at(groups::piece const& p) const {
    if (has_pieces()) return pieces_.data()[p.sample * parts_.cut.pieces + p.begin / parts_.cut.length];
    std::int32_t const counted = *row(p.sample) != 0 ? 1 : 0;
    return {0, counted, counted};
  }
  /// Positions that count.
  [[nodiscard]] std::int64_t count() const { return total_; }
  /// Of these, how many are in group `g`.
  [[nodiscard]] std::int64_t elements(std::int64_t g) const { return counted_[static_cast<std::size_t>(g)]; }

private:
  static bool is_dense(mask_view const& mask) { return mask.spatial == 1 ? mask.stride_n == 1 : mask.stride_s == 1; }
  /// Those of one position are the bytes of the mask.
  [[nodiscard]] bool has_pieces() const { return parts_.cut.spatial != 1; }

  /// Scans the pieces of group `g`; returns how many positions count.
  std::int64_t scan_pieces(std::int64_t g) {
    std::int64_t counted = 0;
    for (std::int64_t i = parts_.begin(g); i < parts_.end(g); ++i) {
      std::int64_t const part = i % parts_.cut.pieces;
      piece const of_piece = scan(row(i / parts_.cut.pieces) + parts_.cut.begin(part), parts_.cut.size(part));
      pieces_.data()[i] = of_piece;
      counted += of_piece.counted;
    }
    return counted;
  }
  static piece scan(std::uint8_t const* mask, std::int64_t n) {
    std::int64_t first = 0, last = n;
    while (first < n && mask[first] == 0) ++first;
    while (last > first && mask[last - 1] == 0) --last;
    return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last),
            static_cast<std::int32_t>(count_nonzero(mask + first, last - first))};
  }

  groups parts_;
  mask_view rows_;
  scratch_lease<std::uint8_t> bytes_;
  scratch_lease<piece> pieces_;
  std::array<std::int64_t, static_cast<std::size_t>(groups::most)> counted_{};
  std::int64_t total_ = 0;
};

/// Groups of pieces of which not all elements count.
struct masked_groups : groups {
  explicit masked_groups(prepared_mask const& of) : groups{of.parts()}, mask{of} {}

  [[nodiscard]] std::int64_t elements(std::int64_t g) const { return mask.elements(g); }

  prepared_mask const& mask;
};

} // namespace syncnorm::host::detail
