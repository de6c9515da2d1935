#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

enum class collective : std::uint8_t { allgather, allreduce, broadcast, scatter, reduce, barrier, split };

/// What a rank says of the collective that it calls, ahead of its data.
struct collective_header {
  std::uint64_t bytes = 0;      ///< that one rank contributes or receives
  std::uint64_t root_bytes = 0; ///< the extent of the buffer that only the root has; ranks need not agree on it
  std::uint32_t sequence = 0;   ///< number of the collective
  std::int32_t root = 0;
  collective operation = collective::barrier;
  std::uint8_t type = 0;
  reduce_op reduction = reduce_op::sum;
  std::array<std::uint8_t, 5> unused{};

  [[nodiscard]] bool agrees_with(collective_header const& other) const {
    return bytes == other.bytes && sequence == other.sequence && root == other.root && operation == other.operation &&
           type == other.type && reduction == other.reduction;
  }
};
static_assert(sizeof(collective_header) == 32);

template <wire_type T>
inline constexpr std::uint8_t wire_code = std::same_as<T, float>          ? 0
                                          : std::same_as<T, double>       ? 1
                                          : std::same_as<T, std::int32_t> ? 2
                                          : std::same_as<T, std::int64_t> ? 3
                                                                          : 4;

inline std::string describe(collective_header const& header) {
  static constexpr std::array operations{"allgather", "allreduce", "broadcast", "scatter",
                                         "reduce",    "barrier",   "split"};
  static constexpr std::array types{"float", "double", "int32", "int64", "byte"};
  static constexpr std::array reductions{"sum", "min", "max"};
  auto const operation = static_cast<std::size_t>(header.operation);
  auto const type = static_cast<std::size_t>(header.type);
  auto const reduction = static_cast<std::size_t>(header.reduction);
  if (operation >= operations.size() || type >= types.size() || reduction >= reductions.size())
    return "something that is no collective";
  std::string text = operations[operation];
  if (header.operation == collective::barrier || header.operation == collective::split) return text;
  text += std::string{"<"} + types[type] + ">";
  if (header.operation == collective::allreduce || header.operation == collective::reduce)
    text += std::string{" "} + reductions[reduction];
  text += " of " + std::to_string(header.bytes) + " bytes";
  if (header.operation == collective::broadcast || header.operation == collective::scatter ||
      header.operation == collective::reduce)
    text += ", root " + std::to_string(header.root);
  return text;
}

inline void require_rank(int root, int size) {
  if (root < 0 || root >= size)
    throw invalid_argument_error{"root " + std::to_string(root) + " is not a rank of a communicator of " +
                                 std::to_string(size)};
}

/// Throws the same mismatch_error on every rank where header_of(r), r < size, do not agree, and the same
/// invalid_argument_error where the root's buffer has the wrong extent.
template <class HeaderOf>
void require_agreement(int size, HeaderOf header_of) {
  collective_header const first = header_of(0);
  for (int r = 1; r < size; ++r) {
    collective_header const other = header_of(r);
    if (!first.agrees_with(other))
      throw mismatch_error{"ranks call different collectives: rank 0 " + describe(first) + " (number " +
                           std::to_string(first.sequence) + "), rank " + std::to_string(r) + " " + describe(other) +
                           " (number " + std::to_string(other.sequence) + ")"};
  }
  std::uint64_t expected = 0;
  if (first.operation == collective::scatter) expected = first.bytes * static_cast<std::uint64_t>(size);
  if (first.operation == collective::reduce) expected = first.bytes;
  collective_header const root = header_of(first.root);
  if (root.root_bytes != expected)
    throw invalid_argument_error{describe(first) + ": the root's buffer has " + std::to_string(root.root_bytes) +
                                 " bytes, expected " + std::to_string(expected)};
}

} // namespace syncnorm::detail
