#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

struct CUstream_st; // what a cudaStream_t points to

namespace syncnorm {

/// How syncnorm reaches a communicator of type `C`. The primary template calls the members; specialize it for a type
/// that cannot have them.
template <class C>
struct communicator_traits {
  static int rank(C const& c) requires requires {
    { c.rank() } -> std::convertible_to<int>;
  }
  { return c.rank(); }
  static int size(C const& c) requires requires {
    { c.size() } -> std::convertible_to<int>;
  }
  { return c.size(); }

  template <wire_type T>
  static void allgather(C const& c, std::span<T const> in, std::span<T> out) requires requires {
    c.allgather(in, out);
  }
  { c.allgather(in, out); }
  template <reducible_type T>
  static void allreduce(C const& c, std::span<T const> in, std::span<T> out, reduce_op op) requires requires {
    c.allreduce(in, out, op);
  }
  { c.allreduce(in, out, op); }
  template <wire_type T>
  static auto allgather_async(C const& c, std::span<T const> in, std::span<T> out) requires requires {
    c.allgather_async(in, out);
  }
  { return c.allgather_async(in, out); }
  template <reducible_type T>
  static auto allreduce_async(C const& c, std::span<T const> in, std::span<T> out, reduce_op op) requires requires {
    c.allreduce_async(in, out, op);
  }
  { return c.allreduce_async(in, out, op); }
  template <wire_type T>
  static void allgather(C const& c, std::span<T const> in, std::span<T> out, CUstream_st* stream) requires requires {
    c.allgather(in, out, stream);
  }
  { c.allgather(in, out, stream); }
  template <reducible_type T>
  static void allreduce(C const& c, std::span<T const> in, std::span<T> out, reduce_op op,
                        CUstream_st* stream) requires requires {
    c.allreduce(in, out, op, stream);
  }
  { c.allreduce(in, out, op, stream); }
};

/// A handle to a group of ranks, cheap to copy.
///
/// Contract of every communicator: 1. All ranks call the same operations in the same order. 2. Zero length is legal.
/// 3. Buffers are borrowed until the operation completes. 4. `allgather` is in rank order. 5. One thread at a time.
/// 6. The user's handle is not owned unless the adapter says so. 7. A failed, missing or late peer is a
/// `communicator_error` (`timeout_error`) within the timeout, never a hang; the communicator is unusable afterwards.
template <class C>
concept communicator = requires(C const& c) {
  { communicator_traits<C>::rank(c) } -> std::same_as<int>;
  { communicator_traits<C>::size(c) } -> std::same_as<int>;
};

/// The handle of an operation in flight: `test()` polls, `wait()` blocks; both rethrow what failed. After completion
/// both return at once. Destruction waits, and discards an error.
template <class W>
concept async_work = std::move_constructible<W> && !std::copy_constructible<W> && requires(W & w) {
  { w.test() } -> std::same_as<bool>;
  { w.wait() } -> std::same_as<void>;
};

/// allgather(in, out): `out` holds size() blocks of in.size() elements in rank order; `in` may be block rank() of
/// `out`. Ranks whose extents differ, as when they are in different passes, had better all throw mismatch_error; where a
/// communicator cannot tell, a `checked_communicator` around it can.
template <class C, class T>
concept allgathers = communicator<C> && requires(C const& c, std::span<T const> in, std::span<T> out) {
  communicator_traits<C>::template allgather<T>(c, in, out);
};

/// allreduce(in, out, op): `out` holds the reduction over the ranks, the same bits on each; `in` may be `out`.
template <class C, class T>
concept allreduces = communicator<C> && requires(C const& c, std::span<T const> in, std::span<T> out, reduce_op op) {
  communicator_traits<C>::template allreduce<T>(c, in, out, op);
};

template <class C, class T>
concept allgathers_async = communicator<C> && requires(C const& c, std::span<T const> in, std::span<T> out) {
  { communicator_traits<C>::template allgather_async<T>(c, in, out) } -> async_work;
};

template <class C, class T>
concept allreduces_async = communicator<C> &&
    requires(C const& c, std::span<T const> in, std::span<T> out, reduce_op op) {
  { communicator_traits<C>::template allreduce_async<T>(c, in, out, op) } -> async_work;
};

/// allgather(in, out, stream) of device memory, in the order of the stream. Unless the communicator says otherwise, the call
/// does not wait for the device or for peers, so that what fails later is thrown by a later call or by `check(comm)`, and it
/// can be captured in a graph.
template <class C, class T>
concept allgathers_on_stream = communicator<C> &&
    requires(C const& c, std::span<T const> in, std::span<T> out, CUstream_st* stream) {
  communicator_traits<C>::template allgather<T>(c, in, out, stream);
};

template <class C, class T>
concept allreduces_on_stream = communicator<C> &&
    requires(C const& c, std::span<T const> in, std::span<T> out, reduce_op op, CUstream_st* stream) {
  communicator_traits<C>::template allreduce<T>(c, in, out, op, stream);
};

/// Completes before the call returns.
template <class C>
concept blocking_communicator = allgathers<C, std::byte> && allgathers<C, float> && allgathers<C, double> &&
    allgathers<C, std::int32_t> && allgathers<C, std::int64_t> && allreduces<C, float> && allreduces<C, double> &&
    allreduces<C, std::int32_t> && allreduces<C, std::int64_t>;

/// Starts the operation and returns its `async_work`.
template <class C>
concept async_communicator =
    allgathers_async<C, std::byte> && allgathers_async<C, float> && allgathers_async<C, double> &&
    allgathers_async<C, std::int32_t> && allgathers_async<C, std::int64_t> && allreduces_async<C, float> &&
    allreduces_async<C, double> && allreduces_async<C, std::int32_t> && allreduces_async<C, std::int64_t>;

/// Works on device memory, in the order of a stream.
template <class C>
concept stream_communicator =
    allgathers_on_stream<C, std::byte> && allgathers_on_stream<C, float> && allgathers_on_stream<C, double> &&
    allgathers_on_stream<C, std::int32_t> && allgathers_on_stream<C, std::int64_t> && allreduces_on_stream<C, float> &&
    allreduces_on_stream<C, double> && allreduces_on_stream<C, std::int32_t> && allreduces_on_stream<C, std::int64_t>;

namespace detail {

inline void require_allgather_extents(std::size_t in, std::size_t out, int size) {
  if (out != in * static_cast<std::size_t>(size))
    throw invalid_argument_error{"allgather: the output has " + std::to_string(out) + " elements, expected " +
                                 std::to_string(size) + " ranks x " + std::to_string(in)};
}

/// Throws where an allgather of `in` has not left it in the place of `rank`, this one, in `out`, so that a communicator which
/// delivers nothing, or in another order, gives no wrong statistics.
inline void require_own_message(int rank, std::span<std::byte const> in, std::span<std::byte const> out) {
  auto const place = out.subspan(in.size() * static_cast<std::size_t>(rank), in.size());
  if (!in.empty() && std::memcmp(in.data(), place.data(), in.size()) != 0)
    throw communicator_error{"allgather", "the communicator did not leave what rank " + std::to_string(rank) +
                                              " sent in the place of that rank"};
}

inline void require_allreduce_extents(std::size_t in, std::size_t out) {
  if (out != in)
    throw invalid_argument_error{"allreduce: the output has " + std::to_string(out) + " elements, the input " +
                                 std::to_string(in)};
}

} // namespace detail

/// Number of ranks. Throws communicator_error where the communicator has less than one. Local.
template <communicator C>
[[nodiscard]] int size(C const& comm) {
  int const ranks = communicator_traits<C>::size(comm);
  if (ranks < 1)
    throw communicator_error{"communicator",
                             "it says that it has " + std::to_string(ranks) + " ranks, expected at least 1"};
  return ranks;
}

/// This rank's number in [0, size). Throws communicator_error where the communicator gives another. Local.
template <communicator C>
[[nodiscard]] int rank(C const& comm) {
  int const own = communicator_traits<C>::rank(comm), ranks = syncnorm::size(comm);
  if (own < 0 || own >= ranks)
    throw communicator_error{"communicator",
                             "it says that this is rank " + std::to_string(own) + " of " + std::to_string(ranks)};
  return own;
}

/// Gathers `in` of every rank into `out` on every rank, in rank order. Collective, blocking. `in` may be block rank()
/// of `out`. Throws invalid_argument_error where out.size() ≠ size·in.size(), on this rank alone; communicator_error.
template <wire_type T, allgathers<T> C>
void allgather(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out) {
  detail::require_allgather_extents(in.size(), out.size(), syncnorm::size(comm));
  communicator_traits<C>::template allgather<T>(comm, in, out);
}

/// Reduces `in` of every rank elementwise into `out` on every rank, the same bits on each. Collective, blocking. `in`
/// may be `out`. Throws invalid_argument_error where the sizes differ, on this rank alone; communicator_error.
template <reducible_type T, allreduces<T> C>
void allreduce(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out,
               reduce_op op = reduce_op::sum) {
  detail::require_allreduce_extents(in.size(), out.size());
  communicator_traits<C>::template allreduce<T>(comm, in, out, op);
}

/// Starts `allgather`, with its errors. The buffers are borrowed until the returned work has completed.
template <wire_type T, allgathers_async<T> C>
[[nodiscard]] auto allgather_async(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out) {
  detail::require_allgather_extents(in.size(), out.size(), syncnorm::size(comm));
  return communicator_traits<C>::template allgather_async<T>(comm, in, out);
}

/// Starts `allreduce`, with its errors. The buffers are borrowed until the returned work has completed.
template <reducible_type T, allreduces_async<T> C>
[[nodiscard]] auto allreduce_async(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out,
                                   reduce_op op = reduce_op::sum) {
  detail::require_allreduce_extents(in.size(), out.size());
  return communicator_traits<C>::template allreduce_async<T>(comm, in, out, op);
}

/// Enqueues `allgather` of device memory on the stream, with its errors as far as they are known by then. The buffers are borrowed until
/// the stream is past it.
template <wire_type T, allgathers_on_stream<T> C>
void allgather(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out, CUstream_st* stream) {
  detail::require_allgather_extents(in.size(), out.size(), syncnorm::size(comm));
  communicator_traits<C>::template allgather<T>(comm, in, out, stream);
}

/// Enqueues `allreduce` of device memory on the stream, with its errors as far as they are known by then. The buffers are borrowed until
/// the stream is past it.
template <reducible_type T, allreduces_on_stream<T> C>
void allreduce(C const& comm, std::type_identity_t<std::span<T const>> in, std::span<T> out, reduce_op op,
               CUstream_st* stream) {
  detail::require_allreduce_extents(in.size(), out.size());
  communicator_traits<C>::template allreduce<T>(comm, in, out, op, stream);
}

/// Throws what has failed on the device or among the peers since the last call, if the communicator can tell. Does not
/// wait. Local.
template <communicator C>
void check(C const& comm) {
  if constexpr (requires { comm.check(); }) comm.check();
}

} // namespace syncnorm
