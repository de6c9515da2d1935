#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/require_rank.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// A communicator that can make the sub-communicator of the ranks that give the same colour, ordered by (key, rank).
template <class C>
concept splits = communicator<C> && requires(C const& c) {
  { c.split(0, 0) } -> communicator;
};

/// A communicator that can be made unusable on this rank at once. Where it can, it wakes every rank that waits for this one, with a
/// communicator_error; over MPI and NCCL the others wait until they time out.
template <class C>
concept aborts = communicator<C> && requires(C const& c) {
  c.abort();
};

/// Whether an asynchronous allgather of bytes goes on while its rank does something else, as far as the communicator says.
template <communicator C>
[[nodiscard]] bool overlaps(C const& comm) {
  if constexpr (requires { comm.overlaps(); })
    return comm.overlaps();
  else
    return allgathers_async<C, std::byte>;
}

/// About how many seconds of this rank's own time a small collective costs, whatever it waits for. A communicator that
/// says it by a member of this name, which does not throw, lets large exchanges be cut into parts; infinity where it says
/// nothing. Local.
template <communicator C>
[[nodiscard]] double exchange_overhead(C const& comm) {
  if constexpr (requires { comm.exchange_overhead(); })
    return comm.exchange_overhead();
  else
    return std::numeric_limits<double>::infinity();
}

/// The sub-communicator of the ranks that give the same `color`, ordered by (key, rank). `color`: any int; over NCCL not negative.
/// Collective over `comm`.
template <splits C>
[[nodiscard]] auto split(C const& comm, int color, int key = 0) {
  return comm.split(color, key);
}

/// Calls f(). A communicator with `batch` issues the asynchronous or stream collectives that f starts as one.
template <communicator C, class F>
void batch(C const& comm, F const& f) {
  if constexpr (requires { comm.batch(f); })
    comm.batch(f);
  else
    f();
}

/// Returns on no rank before every rank has entered. Collective.
template <communicator C>
void barrier(C const& comm) {
  if constexpr (requires { comm.barrier(); }) {
    comm.barrier();
  } else if constexpr (allreduces<C, std::int32_t>) {
    std::int32_t token = 0;
    syncnorm::allreduce(comm, std::span<std::int32_t const>{&token, 1}, std::span{&token, 1});
  } else {
    std::byte const token{};
    std::vector<std::byte> all(static_cast<std::size_t>(syncnorm::size(comm)));
    syncnorm::allgather(comm, std::span{&token, 1}, std::span{all});
  }
}

namespace detail {

/// Lets the ranks compare `extent`, and the extent of a buffer that the root alone has, which must be `factor` times as
/// much; throws the same on every rank where they do not fit. Collective.
template <communicator C>
void require_root_extents(C const& comm, std::string const& operation, std::size_t extent, std::size_t root_extent,
                          std::size_t factor, int root) {
  std::array<std::int64_t, 2> const own{static_cast<std::int64_t>(extent), static_cast<std::int64_t>(root_extent)};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(syncnorm::size(comm)));
  syncnorm::allgather(comm, own, std::span{all});
  auto const wanted = all[2 * static_cast<std::size_t>(root)], found = all[2 * static_cast<std::size_t>(root) + 1];
  for (int r = 0; r < syncnorm::size(comm); ++r)
    if (auto const other = all[2 * static_cast<std::size_t>(r)]; other != wanted)
      throw mismatch_error{operation + ": rank " + std::to_string(r) + " has " + std::to_string(other) +
                           " elements, rank " + std::to_string(root) + " " + std::to_string(wanted)};
  if (auto const expected = wanted * static_cast<std::int64_t>(factor); found != expected)
    throw invalid_argument_error{operation + ": the buffer of rank " + std::to_string(root) + ", the root, has " +
                                 std::to_string(found) + " elements, expected " + std::to_string(expected)};
}

} // namespace detail

/// Copies `data` of rank `root` to every rank. Collective. Without a broadcast of the communicator's own it is an
/// allgather, whose memory is size·data.size(). Throws invalid_argument_error at once, on this rank alone, where `root` is none of the
/// ranks; mismatch_error, communicator_error.
template <wire_type T, communicator C>
void broadcast(C const& comm, std::span<T> data, int root) {
  detail::require_rank(root, syncnorm::size(comm));
  if constexpr (requires { comm.broadcast(data, root); }) {
    comm.broadcast(data, root);
  } else {
    std::vector<T> all(data.size() * static_cast<std::size_t>(syncnorm::size(comm)));
    syncnorm::allgather(comm, data, std::span{all});
    auto const first = std::span<T const>{all}.subspan(data.size() * static_cast<std::size_t>(root), data.size());
    std::ranges::copy(first, data.begin());
  }
}

/// Block r of `in` on rank `root`, of out.size() elements, goes to `out` on rank r; `in` is read on the root alone.
/// Collective. Without a scatter of the communicator's own it is an exchange of extents, which throws on every rank
/// where they do not fit, and a broadcast. Throws as `broadcast`, and invalid_argument_error on every rank where `in` does not fit.
template <wire_type T, communicator C>
void scatter(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out, int root) {
  detail::require_rank(root, syncnorm::size(comm));
  if constexpr (requires { comm.scatter(in, out, root); }) {
    comm.scatter(in, out, root);
  } else {
    detail::require_root_extents(comm, "scatter", out.size(), in.size(), static_cast<std::size_t>(syncnorm::size(comm)),
                                 root);
    std::vector<T> all(out.size() * static_cast<std::size_t>(syncnorm::size(comm)));
    if (syncnorm::rank(comm) == root) std::ranges::copy(in, all.begin());
    syncnorm::broadcast(comm, std::span{all}, root);
    std::ranges::copy(std::span{all}.subspan(out.size() * static_cast<std::size_t>(syncnorm::rank(comm)), out.size()),
                      out.begin());
  }
}

/// Reduces `in` of every rank elementwise into `out` on rank `root`; other ranks' `out` may be empty. Collective.
/// Without a reduce of the communicator's own it is an exchange of extents, as for `scatter`, and an allreduce. Throws as
/// `scatter`.
template <reducible_type T, communicator C>
void reduce(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out, int root,
            reduce_op op = reduce_op::sum) {
  detail::require_rank(root, syncnorm::size(comm));
  if constexpr (requires { comm.reduce(in, out, root, op); }) {
    comm.reduce(in, out, root, op);
  } else {
    detail::require_root_extents(comm, "reduce", in.size(), out.size(), 1, root);
    std::vector<T> all(in.size());
    syncnorm::allreduce(comm, in, std::span{all}, op);
    if (syncnorm::rank(comm) == root) std::ranges::copy(all, out.begin());
  }
}

} // namespace syncnorm
