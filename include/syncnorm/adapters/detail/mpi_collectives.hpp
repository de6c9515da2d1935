#pragma once

#include <algorithm>
#include <climits>
#include <concepts>
#include <cstddef>
#include <memory>
#include <span>

#include <syncnorm/adapters/detail/channel_work.hpp>
#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/mpi_channel.hpp>
#include <syncnorm/adapters/detail/mpi_include.hpp>
#include <syncnorm/adapters/detail/rank_order.hpp>
#include <syncnorm/comm/wire.hpp>

// The collectives over an mpi_channel. Each starts the operation. Those that are not told to agree expect that the ranks have agreed.
namespace syncnorm::detail::mpi_collectives {

using work = channel_work<mpi_channel, mpi_slot>;
using channel_ptr = std::shared_ptr<mpi_channel>;

template <reducible_type T>
MPI_Datatype mpi_type() {
  if constexpr (std::same_as<T, float>) return MPI_FLOAT;
  if constexpr (std::same_as<T, double>) return MPI_DOUBLE;
  if constexpr (std::same_as<T, std::int32_t>) return MPI_INT32_T;
  if constexpr (std::same_as<T, std::int64_t>) return MPI_INT64_T;
}

inline MPI_Op mpi_op(reduce_op op) { return op == reduce_op::sum ? MPI_SUM : op == reduce_op::min ? MPI_MIN : MPI_MAX; }

/// An operation for which nothing is started yet. What it needs is allocated before anything is, and its result taken out where all was
/// started: so a rank that lacks the memory throws, and leaves nothing half done.
inline work begin(channel_ptr const& channel, collective_header const& header) {
  return {channel, channel->open(header)};
}

/// Only finds out whether every rank says `header`.
inline work agreement(channel_ptr const& channel, collective_header const& header) {
  auto result = begin(channel, header);
  channel->agree(result.slot());
  return result;
}

/// Gathers `bytes` bytes, from byte `first` on, of the contribution of every rank.
inline work allgather(channel_ptr const& channel, collective_header const& header, std::span<std::byte const> in,
                      std::byte* out, std::size_t first, std::size_t bytes, bool agree) {
  auto result = begin(channel, header);
  auto& slot = result.slot();
  slot.out = out + first;
  slot.bytes = bytes;
  slot.pitch = in.size();
  channel->gather(slot, in.subspan(first, bytes), agree);
  slot.finish = [](mpi_slot& s) {
    for (int r = 0; r < s.ranks; ++r) copy_bytes(s.part(r), s.received_from(r), s.bytes);
  };
  return result;
}

/// Gathers every contribution and folds them in rank order.
template <reducible_type T>
work fold(channel_ptr const& channel, collective_header const& header, std::span<T const> in, std::span<T> out) {
  auto result = begin(channel, header);
  auto& slot = result.slot();
  slot.out = reinterpret_cast<std::byte*>(out.data());
  channel->gather(slot, std::as_bytes(in), true);
  slot.finish = [](mpi_slot& s) {
    std::span<T> const folded{reinterpret_cast<T*>(s.out), bytes_of(s.header) / sizeof(T)};
    fold_in_rank_order(folded, s.ranks, s.header.called.op,
                       [&](int r) { return reinterpret_cast<T const*>(s.received_from(r)); });
  };
  return result;
}

/// MPI's own reduction, to every rank or to the root alone.
template <reducible_type T>
work reduction(channel_ptr const& channel, collective_header const& header, std::span<T const> in, std::span<T> out,
               bool to_all) {
  auto result = begin(channel, header);
  auto& slot = result.slot();
  slot.out = reinterpret_cast<std::byte*>(out.data());
  slot.bytes = to_all || channel->rank() == header.called.root ? in.size_bytes() : 0;
  slot.sent.hold(in.size_bytes());
  slot.received.hold(in.size_bytes());
  slot.requests.reserve(in.size() / INT_MAX + 1);
  copy_bytes(slot.sent.data.get(), std::as_bytes(in).data(), in.size_bytes());
  auto* const from = reinterpret_cast<T*>(slot.sent.data.get());
  auto* const to = reinterpret_cast<T*>(slot.received.data.get());
  for (std::size_t first = 0; first < in.size(); first += INT_MAX) {
    auto const n = static_cast<int>(std::min<std::size_t>(INT_MAX, in.size() - first));
    channel->start(slot, to_all ? "MPI_Iallreduce" : "MPI_Ireduce", [&](MPI_Request* request) {
      auto const op = mpi_op(header.called.op);
      return to_all ? MPI_Iallreduce(from + first, to + first, n, mpi_type<T>(), op, channel->comm(), request)
                    : MPI_Ireduce(from + first, to + first, n, mpi_type<T>(), op, header.called.root, channel->comm(),
                                  request);
    });
  }
  slot.finish = [](mpi_slot& s) { copy_bytes(s.out, s.received.data.get(), s.bytes); };
  return result;
}

/// A part of at most INT_MAX bytes.
inline work broadcast(channel_ptr const& channel, collective_header const& header, std::span<std::byte> data) {
  auto result = begin(channel, header);
  auto& slot = result.slot();
  slot.out = data.data();
  slot.bytes = channel->rank() == header.called.root ? 0 : data.size();
  slot.sent.hold(data.size());
  if (channel->rank() == header.called.root) copy_bytes(slot.sent.data.get(), data.data(), data.size());
  channel->start(slot, "MPI_Ibcast", [&](MPI_Request* request) {
    auto const n = static_cast<int>(data.size());
    return MPI_Ibcast(slot.sent.data.get(), n, MPI_BYTE, header.called.root, channel->comm(), request);
  });
  slot.finish = [](mpi_slot& s) { copy_bytes(s.out, s.sent.data.get(), s.bytes); };
  return result;
}

/// A part, from byte `first` on, of what each rank gets; at most INT_MAX bytes of it.
inline work scatter(channel_ptr const& channel, collective_header const& header, std::span<std::byte const> in,
                    std::size_t first, std::span<std::byte> out) {
  auto result = begin(channel, header);
  auto& slot = result.slot();
  slot.out = out.data();
  slot.bytes = out.size();
  auto const ranks = static_cast<std::size_t>(channel->size());
  slot.received.hold(out.size());
  if (channel->rank() == header.called.root) {
    slot.sent.hold(out.size() * ranks);
    for (std::size_t r = 0; r < ranks; ++r)
      copy_bytes(slot.sent.data.get() + r * out.size(), in.data() + r * bytes_of(header) + first, out.size());
  }
  channel->start(slot, "MPI_Iscatter", [&](MPI_Request* request) {
    auto const n = static_cast<int>(out.size());
    return MPI_Iscatter(slot.sent.data.get(), n, MPI_BYTE, slot.received.data.get(), n, MPI_BYTE, header.called.root,
                        channel->comm(), request);
  });
  slot.finish = [](mpi_slot& s) { copy_bytes(s.out, s.received.data.get(), s.bytes); };
  return result;
}

} // namespace syncnorm::detail::mpi_collectives
