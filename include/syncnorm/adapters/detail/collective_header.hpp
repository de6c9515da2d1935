#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <syncnorm/comm/detail/signature.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// What a rank says of the collective that it calls, ahead of its data.
struct collective_header {
  signature called;
  // What need not be the same on all ranks:
  std::int64_t root_extent = 0;         // of the buffer that only the root has
  std::uint32_t all_received_below = 0; // number of the first collective of which this rank still lacks packets
  std::uint32_t unused = 0;
};
static_assert(sizeof(collective_header) == 40);

template <wire_type T>
collective_header make_header(collective_kind kind, std::size_t extent, int root = -1, reduce_op op = reduce_op::sum) {
  collective_header header;
  header.called.kind = kind;
  header.called.extent = static_cast<std::int64_t>(extent);
  header.called.type = wire_id_of<T>;
  header.called.root = root;
  header.called.op = op;
  return header;
}

/// Bytes that one rank contributes or receives.
inline std::size_t bytes_of(collective_header const& header) {
  auto const element = visit_wire(header.called.type, [](auto value) { return sizeof value; });
  return static_cast<std::size_t>(header.called.extent) * element;
}

/// Throws the same mismatch_error on every rank where header_of(r), r < size, do not agree, and the same
/// invalid_argument_error where the root's buffer has the wrong extent.
template <class HeaderOf>
void require_agreement(int size, HeaderOf header_of) {
  if (auto const text = describe_mismatch(size, [&](int r) { return header_of(r).called; }); !text.empty())
    throw mismatch_error{text};
  auto const called = header_of(0).called;
  if (called.kind != collective_kind::scatter && called.kind != collective_kind::reduce) return;
  auto const expected = called.kind == collective_kind::scatter ? called.extent * size : called.extent;
  if (auto const extent = header_of(called.root).root_extent; extent != expected)
    throw invalid_argument_error{describe(called) + ": the buffer of the root has " + std::to_string(extent) +
                                 " elements, expected " + std::to_string(expected)};
}

} // namespace syncnorm::detail
