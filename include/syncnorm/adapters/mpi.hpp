#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/adapters/detail/channel_work.hpp>
#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/mpi_channel.hpp>
#include <syncnorm/adapters/detail/mpi_collectives.hpp>
#include <syncnorm/adapters/detail/mpi_include.hpp>
#include <syncnorm/adapters/mpi_error.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/require_rank.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// The work of a collective over MPI. MPI moves data while some thread of the process is inside MPI: testing or
/// waiting for any operation serves them all.
using mpi_work = detail::channel_work<detail::mpi_channel, detail::mpi_slot>;

/// The communicator of an MPI_Comm.
///
/// Everything but `split` is MPI's nonblocking collectives, polled, so that a missing peer is a timeout_error and no hang. As MPI
/// cannot cancel a collective, data pass through memory of the communicator's own, which outlives a failure; user memory
/// is never touched after a call has returned or thrown. An allreduce of up to 128 KiB over all ranks folds the contributions in
/// rank order; a longer one is MPI_Iallreduce, of which Open MPI and MPICH give every rank the same bits, as the MPI
/// standard advises.
///
/// Ranks that call different collectives, or with different extents, types or roots, get mismatch_error, after which the
/// communicator is unusable. So that this is known before more is sent than there is room for, an asynchronous allgather of
/// more than 256 KiB of a rank, or allreduce of more than 128 KiB over all ranks, waits for them to agree before it returns.
/// Whatever thread calls, one at a time: where it is not the one that initialized MPI, as libtorch's for backward passes of CUDA tensors,
/// MPI has to provide MPI_THREAD_SERIALIZED.
/// A failure of MPI is an mpi_error only if the error handler of the MPI_Comm is MPI_ERRORS_RETURN, which `duplicate` and
/// `split` set; otherwise MPI ends the process.
class mpi_communicator {
public:
  /// Does not own `comm`, which must outlive the communicator. Other users of `comm` must not start collectives in between
  /// in another order on some rank. Local. Throws invalid_argument_error where `comm` is null or connects two groups,
  /// or the timeout is not positive; mpi_error where MPI is not initialized or finalized already.
  explicit mpi_communicator(MPI_Comm comm, std::chrono::milliseconds timeout = default_timeout)
      : channel_{make_channel(comm, false, timeout)} {}

  /// The communicator over a duplicate of `comm`, which it owns and frees. Collective. Throws as the constructor.
  [[nodiscard]] static mpi_communicator duplicate(MPI_Comm comm, std::chrono::milliseconds timeout = default_timeout);

  [[nodiscard]] int rank() const noexcept { return channel_->rank(); }
  [[nodiscard]] int size() const noexcept { return channel_->size(); }
  [[nodiscard]] double exchange_overhead() const noexcept { return 3e-6; }
  [[nodiscard]] exchange_cost cost_of_exchange() const noexcept { return {.latency = 2e-6, .bandwidth = 5e9}; }
  [[nodiscard]] MPI_Comm native_handle() const noexcept { return channel_->comm(); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    auto const said = detail::make_header<T>(detail::collective_kind::allgather, in.size());
    bool const agree = in.size_bytes() <= detail::mpi_channel::most_unagreed;
    if (!agree) agree_on(said);
    for_each_piece(in.size_bytes(), piece_bytes, [&](std::size_t first, std::size_t bytes) {
      return detail::mpi_collectives::allgather(channel_, said, std::as_bytes(in), std::as_writable_bytes(out).data(),
                                                first, bytes, agree);
    });
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    auto const said = detail::make_header<T>(detail::collective_kind::allreduce, in.size(), -1, op);
    if (folds(in.size_bytes())) return detail::mpi_collectives::fold(channel_, said, in, out).wait();
    agree_on(said);
    for_each_piece(in.size(), piece_bytes / sizeof(T), [&](std::size_t first, std::size_t n) {
      return detail::mpi_collectives::reduction(channel_, said, in.subspan(first, n), out.subspan(first, n), true);
    });
  }
  template <wire_type T>
  [[nodiscard]] mpi_work allgather_async(std::span<T const> in, std::span<T> out) const {
    auto const said = detail::make_header<T>(detail::collective_kind::allgather, in.size());
    bool const agree = in.size_bytes() <= detail::mpi_channel::most_unagreed;
    if (!agree) agree_on(said);
    return detail::mpi_collectives::allgather(channel_, said, std::as_bytes(in), std::as_writable_bytes(out).data(), 0,
                                              in.size_bytes(), agree);
  }
  template <reducible_type T>
  [[nodiscard]] mpi_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    auto const said = detail::make_header<T>(detail::collective_kind::allreduce, in.size(), -1, op);
    if (folds(in.size_bytes())) return detail::mpi_collectives::fold(channel_, said, in, out);
    agree_on(said);
    return detail::mpi_collectives::reduction(channel_, said, in, out, true);
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    detail::require_rank(root, size());
    auto const said = detail::make_header<T>(detail::collective_kind::broadcast, data.size(), root);
    agree_on(said);
    for_each_piece(data.size_bytes(), piece_bytes, [&](std::size_t first, std::size_t bytes) {
      return detail::mpi_collectives::broadcast(channel_, said, std::as_writable_bytes(data).subspan(first, bytes));
    });
  }
  template <wire_type T>
  void scatter(std::span<T const> in, std::span<T> out, int root) const {
    detail::require_rank(root, size());
    auto said = detail::make_header<T>(detail::collective_kind::scatter, out.size(), root);
    if (rank() == root) said.root_extent = static_cast<std::int64_t>(in.size());
    agree_on(said);
    for_each_piece(out.size_bytes(), piece_bytes, [&](std::size_t first, std::size_t bytes) {
      return detail::mpi_collectives::scatter(channel_, said, std::as_bytes(in), first,
                                              std::as_writable_bytes(out).subspan(first, bytes));
    });
  }
  template <reducible_type T>
  void reduce(std::span<T const> in, std::span<T> out, int root, reduce_op op) const {
    detail::require_rank(root, size());
    auto said = detail::make_header<T>(detail::collective_kind::reduce, in.size(), root, op);
    if (rank() == root) said.root_extent = static_cast<std::int64_t>(out.size());
    agree_on(said);
    for_each_piece(in.size(), piece_bytes / sizeof(T), [&](std::size_t first, std::size_t n) {
      auto const to = rank() == root ? out.subspan(first, n) : std::span<T>{};
      return detail::mpi_collectives::reduction(channel_, said, in.subspan(first, n), to, false);
    });
  }
  void barrier() const { agree_on({}); }

  /// The communicator of the ranks that give the same colour, in the order of (key, rank). It owns its MPI_Comm. Collective. The timeout
  /// is for the ranks to come; MPI's own split, which they then begin, is waited for however long a rank that stops in it takes. Throws
  /// timeout_error, mpi_error.
  [[nodiscard]] mpi_communicator split(int color, int key) const;

  /// Makes this rank's communicator unusable, so that what waits in it fails. MPI has no way to wake the other ranks,
  /// which time out, but to end them, for which call MPI_Abort. Another thread may call this one member.
  void abort() const { channel_->fail("aborted on rank " + std::to_string(rank())); }

private:
  static constexpr std::size_t piece_bytes = 512 * 1024, most_folded = 128 * 1024;
  static_assert(most_folded <= detail::mpi_channel::most_unagreed);

  /// Gathering moves more than a reduction does, but in fewer steps.
  [[nodiscard]] bool folds(std::size_t bytes) const { return bytes * static_cast<std::size_t>(size()) <= most_folded; }

  explicit mpi_communicator(std::shared_ptr<detail::mpi_channel> channel) : channel_{std::move(channel)} {}

  static std::shared_ptr<detail::mpi_channel> make_channel(MPI_Comm comm, bool owned,
                                                           std::chrono::milliseconds timeout) {
    detail::require_mpi_running();
    if (comm == MPI_COMM_NULL) throw invalid_argument_error{"mpi_communicator: the MPI_Comm is null"};
    timeout = detail::checked_timeout("mpi_communicator", timeout);
    int connects_two = 0;
    detail::require_mpi(MPI_Comm_test_inter(comm, &connects_two), "MPI_Comm_test_inter");
    if (connects_two != 0) throw invalid_argument_error{"mpi_communicator: the MPI_Comm is an intercommunicator"};
    if (owned) detail::require_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return std::make_shared<detail::mpi_channel>(comm, owned, timeout);
  }

  void agree_on(detail::collective_header const& said) const {
    detail::mpi_collectives::agreement(channel_, said).wait();
  }

  /// start(first, n).wait() for the pieces of `all`, one after the other, so that the communicator's memory stays
  /// small and in the cache. Nothing is one piece.
  template <class Start>
  static void for_each_piece(std::size_t all, std::size_t piece, Start start) {
    std::size_t first = 0;
    do {
      auto const n = std::min(piece, all - first);
      start(first, n).wait();
      first += n;
    } while (first < all);
  }

  std::shared_ptr<detail::mpi_channel> channel_;
};

inline mpi_communicator mpi_communicator::duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  auto const original = make_channel(comm, false, timeout);
  detail::mpi_collectives::work work{original,
                                     original->open({.called = {.kind = detail::collective_kind::duplication}})};
  MPI_Comm copy = MPI_COMM_NULL;
  auto& slot = work.slot();
  slot.out = reinterpret_cast<std::byte*>(&copy);
  slot.finish = [](detail::mpi_slot& s) { *reinterpret_cast<MPI_Comm*>(s.out) = s.made; };
  // MPI may write to the slot after a timeout, too.
  original->start(slot, "MPI_Comm_idup",
                  [&](MPI_Request* request) { return MPI_Comm_idup(comm, &slot.made, request); });
  work.wait();
  return mpi_communicator{make_channel(copy, true, timeout)};
}

inline mpi_communicator mpi_communicator::split(int color, int key) const {
  std::vector<std::array<std::int32_t, 2>> wishes(static_cast<std::size_t>(size()));
  std::array<std::int32_t, 2> const own{color, key};
  allgather<std::int32_t>(own, {wishes.front().data(), wishes.size() * 2});
  // MPI wants colours that are not negative.
  std::vector<std::int32_t> colors;
  for (auto const& wish : wishes) colors.push_back(wish[0]);
  std::ranges::sort(colors);
  auto const index = std::ranges::lower_bound(colors, color) - colors.begin();
  // A rank that gave up above does not come to the barrier, so that no other one begins what would wait for it.
  barrier();
  MPI_Comm part = MPI_COMM_NULL;
  detail::require_mpi(MPI_Comm_split(native_handle(), static_cast<int>(index), key, &part), "MPI_Comm_split");
  return mpi_communicator{make_channel(part, true, channel_->timeout())};
}

} // namespace syncnorm
