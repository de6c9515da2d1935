#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include <syncnorm/comm/wire.hpp>

namespace syncnorm::detail {

enum class wire_id : std::uint8_t { bytes, float32, float64, int32, int64 };

template <wire_type T>
inline constexpr wire_id wire_id_of = std::same_as<T, std::byte>      ? wire_id::bytes
                                      : std::same_as<T, float>        ? wire_id::float32
                                      : std::same_as<T, double>       ? wire_id::float64
                                      : std::same_as<T, std::int32_t> ? wire_id::int32
                                                                      : wire_id::int64;

/// Calls `f(T{})` with the type that `id` stands for.
template <class F>
decltype(auto) visit_wire(wire_id id, F&& f) {
  switch (id) {
  case wire_id::float32:
    return f(float{});
  case wire_id::float64:
    return f(double{});
  case wire_id::int32:
    return f(std::int32_t{});
  case wire_id::int64:
    return f(std::int64_t{});
  default:
    return f(std::byte{});
  }
}

enum class collective_kind : std::uint8_t {
  allgather,
  allreduce,
  barrier,
  split,
  broadcast,
  scatter,
  reduce,
  duplication
};

/// What one rank believes it is computing together with the others. It crosses ranks as bytes, so it has no
/// padding.
struct signature {
  std::int64_t sequence = 0; // how many operations this rank has started before
  std::int64_t extent = 0;
  std::int32_t root = -1;
  collective_kind kind = collective_kind::barrier;
  wire_id type = wire_id::bytes;
  reduce_op op = reduce_op::sum;
  std::uint8_t unused = 0;

  friend bool operator==(signature const&, signature const&) = default;
};
static_assert(std::has_unique_object_representations_v<signature>);

[[nodiscard]] inline std::string describe(signature const& s) {
  static constexpr char const* kinds[] = {"allgather", "allreduce", "barrier", "split",
                                          "broadcast", "scatter",   "reduce",  "duplication"};
  static constexpr char const* types[] = {"byte", "float", "double", "int32", "int64"};
  static constexpr char const* ops[] = {"sum", "min", "max"};
  std::string text = kinds[static_cast<int>(s.kind)];
  if (s.kind == collective_kind::barrier || s.kind == collective_kind::split || s.kind == collective_kind::duplication)
    return text;
  if (s.kind == collective_kind::allreduce || s.kind == collective_kind::reduce)
    text += std::string{" ("} + ops[static_cast<int>(s.op)] + ")";
  text += " of " + std::to_string(s.extent) + " " + types[static_cast<int>(s.type)];
  if (s.kind == collective_kind::broadcast || s.kind == collective_kind::scatter)
    text += " from rank " + std::to_string(s.root);
  if (s.kind == collective_kind::reduce) text += " to rank " + std::to_string(s.root);
  return text;
}

/// "rank 2" or "ranks 0, 2, 3" of the ranks for which `chosen(rank)` holds; empty where it holds for none.
template <class F>
[[nodiscard]] std::string list_ranks(int size, F&& chosen) {
  std::string list;
  int count = 0;
  for (int r = 0; r < size; ++r) {
    if (!chosen(r)) continue;
    list += (count++ == 0 ? "" : ", ") + std::to_string(r);
  }
  return count == 0 ? list : (count == 1 ? "rank " : "ranks ") + list;
}

/// Says which ranks asked for what, by `at(rank)`; empty where all signatures are equal.
template <class F>
[[nodiscard]] std::string describe_mismatch(int size, F&& at) {
  auto const differs_from_first = [&](int r) { return !(at(r) == at(0)); };
  if (list_ranks(size, differs_from_first).empty()) return {};
  std::string text = "ranks disagree on collective " + std::to_string(at(0).sequence);
  char const* separator = ": ";
  for (int r = 0; r < size; ++r) {
    bool first_of_its_kind = true;
    for (int earlier = 0; earlier < r; ++earlier) first_of_its_kind = first_of_its_kind && !(at(earlier) == at(r));
    if (!first_of_its_kind) continue;
    text += separator + list_ranks(size, [&](int other) { return at(other) == at(r); }) + ": " + describe(at(r));
    if (at(r).sequence != at(0).sequence) text += " as collective " + std::to_string(at(r).sequence);
    separator = "; ";
  }
  return text;
}

} // namespace syncnorm::detail
