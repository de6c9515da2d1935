#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>

#include <support/sanitized.hpp>

// The contract of communicators as checks. Every rank calls check_contract with its communicator; optional
// capabilities are checked where the communicator has them. Only CHECKs are used, so ranks may be threads.
namespace contract {

inline constexpr std::array<std::size_t, 5> extents{0, 1, 3, 17, 1000};
/// Beyond what any adapter sends at once: of numbers, of bytes, and of what is in flight with others.
inline constexpr std::size_t large_extent = test::sanitized ? 10'000 : 100'000,
                             large_bytes = test::sanitized ? 40'000 : 100'000,
                             large_in_flight = test::sanitized ? 10'000 : 50'000;
inline constexpr std::array<syncnorm::reduce_op, 3> ops{syncnorm::reduce_op::sum, syncnorm::reduce_op::min,
                                                        syncnorm::reduce_op::max};

/// What rank `rank` holds at `i`: small integers, whose sums are exact in every type. `salt` tells operations
/// apart.
template <class T>
T value(int rank, std::size_t i, int salt) {
  auto const raw = (static_cast<std::size_t>(rank) * 37 + i * 11 + static_cast<std::size_t>(salt) * 5) % 101;
  if constexpr (std::is_same_v<T, std::byte>) {
    return static_cast<std::byte>(raw);
  } else {
    return static_cast<T>(static_cast<int>(raw) - 50);
  }
}

template <class T>
std::vector<T> values(int rank, std::size_t extent, int salt) {
  std::vector<T> all(extent);
  for (std::size_t i = 0; i < extent; ++i) all[i] = value<T>(rank, i, salt);
  return all;
}

template <class T>
std::vector<T> gathered(int size, std::size_t extent, int salt) {
  std::vector<T> all;
  for (int r = 0; r < size; ++r) {
    auto const block = values<T>(r, extent, salt);
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

template <class T>
std::vector<T> reduced(int size, std::size_t extent, int salt, syncnorm::reduce_op op) {
  auto all = values<T>(0, extent, salt);
  for (int r = 1; r < size; ++r)
    for (std::size_t i = 0; i < extent; ++i) {
      auto const more = value<T>(r, i, salt);
      if (op == syncnorm::reduce_op::sum)
        all[i] = static_cast<T>(all[i] + more);
      else if ((op == syncnorm::reduce_op::min) == (more < all[i]))
        all[i] = more;
    }
  return all;
}

/// A value that no operation leaves in an output.
template <class T>
T poison() {
  if constexpr (std::is_same_v<T, std::byte>)
    return std::byte{0xee};
  else
    return static_cast<T>(-30'000);
}

template <class T, class C>
void check_allgather(C const& comm, std::size_t extent, int salt) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  auto const expected = gathered<T>(size, extent, salt);
  auto const in = values<T>(rank, extent, salt);
  INFO("allgather, extent ", extent, ", rank ", rank, " of ", size);

  std::vector<T> out(expected.size(), poison<T>());
  syncnorm::allgather(comm, in, std::span{out});
  CHECK((out == expected));
  CHECK((in == values<T>(rank, extent, salt)));

  std::vector<T> in_place(expected.size(), poison<T>());
  auto const own = std::span{in_place}.subspan(extent * static_cast<std::size_t>(rank), extent);
  std::ranges::copy(in, own.begin());
  syncnorm::allgather(comm, own, std::span{in_place});
  CHECK((in_place == expected));
}

template <class T, class C>
void check_allreduce(C const& comm, std::size_t extent, int salt, syncnorm::reduce_op op) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  auto const expected = reduced<T>(size, extent, salt, op);
  auto const in = values<T>(rank, extent, salt);
  INFO("allreduce, op ", static_cast<int>(op), ", extent ", extent, ", rank ", rank, " of ", size);

  std::vector<T> out(extent, poison<T>());
  syncnorm::allreduce(comm, in, std::span{out}, op);
  CHECK((out == expected));
  CHECK((in == values<T>(rank, extent, salt)));

  auto in_place = in;
  syncnorm::allreduce(comm, std::span<T const>{in_place}, std::span{in_place}, op);
  CHECK((in_place == expected));
}

template <class T, class C>
void check_type(C const& comm) {
  int salt = 0;
  for (auto const extent : extents) {
    check_allgather<T>(comm, extent, ++salt);
    if constexpr (syncnorm::reducible_type<T>)
      for (auto const op : ops) check_allreduce<T>(comm, extent, ++salt, op);
  }
}

template <class C>
void check_large(C const& comm) {
  check_allgather<std::byte>(comm, large_bytes, 1);
  check_allgather<double>(comm, large_extent, 2);
  check_allreduce<float>(comm, large_extent, 3, syncnorm::reduce_op::sum);
  check_allreduce<std::int64_t>(comm, large_extent, 4, syncnorm::reduce_op::max);
}

/// Values beyond the range of narrower types must cross unchanged.
template <class C>
void check_wide_values(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  std::int64_t const wide = std::numeric_limits<std::int64_t>::max() - rank;
  std::int64_t least = 0;
  syncnorm::allreduce(comm, std::span{&wide, 1}, std::span{&least, 1}, syncnorm::reduce_op::min);
  CHECK(least == std::numeric_limits<std::int64_t>::max() - (size - 1));

  double const fine = 1.0 + std::ldexp(1.0, -50) * rank;
  double most = 0;
  syncnorm::allreduce(comm, std::span{&fine, 1}, std::span{&most, 1}, syncnorm::reduce_op::max);
  CHECK(most == 1.0 + std::ldexp(1.0, -50) * (size - 1));
}

/// Every rank must hold the same bits, even where the order of a sum matters.
template <class T, class C>
void check_same_bits(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  for (auto const extent : {std::size_t{1}, std::size_t{5}, std::size_t{1000}}) {
    std::vector<T> data(extent);
    for (std::size_t i = 0; i < extent; ++i)
      data[i] = static_cast<T>(std::sin(static_cast<double>(i + 1) * (rank + 1)) *
                               std::pow(10.0, 3 * ((rank + static_cast<int>(i)) % 5)));
    syncnorm::allreduce(comm, std::span<T const>{data}, std::span{data});
    std::vector<std::byte> all(data.size() * sizeof(T) * static_cast<std::size_t>(size));
    auto const own = std::as_bytes(std::span{data});
    syncnorm::allgather(comm, own, std::span{all});
    for (int r = 0; r < size; ++r) {
      INFO("extent ", extent, ", rank ", rank, " against rank ", r);
      CHECK(std::ranges::equal(own, std::span{all}.subspan(own.size() * static_cast<std::size_t>(r), own.size())));
    }
  }
}

template <class C>
void check_back_to_back(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  std::vector<float> gather_out;
  std::vector<std::int64_t> sum_out;
  bool right = true;
  for (int i = 0; i < 300; ++i) {
    auto const extent = static_cast<std::size_t>(i * 7 % 41);
    gather_out.assign(extent * static_cast<std::size_t>(size), poison<float>());
    syncnorm::allgather(comm, values<float>(rank, extent, i), std::span{gather_out});
    right = right && gather_out == gathered<float>(size, extent, i);
    sum_out.assign(extent, poison<std::int64_t>());
    syncnorm::allreduce(comm, values<std::int64_t>(rank, extent, i), std::span{sum_out},
                        ops[static_cast<std::size_t>(i) % 3]);
    right = right && sum_out == reduced<std::int64_t>(size, extent, i, ops[static_cast<std::size_t>(i) % 3]);
  }
  CHECK(right);
}

/// Extents that are wrong on every rank throw before anything is sent, so that the communicator works on.
template <class C>
void check_extents(C const& comm) {
  std::array<float, 3> const in{};
  std::vector<float> out(3 * static_cast<std::size_t>(syncnorm::size(comm)) + 1);
  CHECK_THROWS_AS(syncnorm::allgather(comm, in, std::span{out}), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(syncnorm::allreduce(comm, in, std::span{out}.first(2)), syncnorm::invalid_argument_error);
  if constexpr (syncnorm::async_communicator<C>) {
    CHECK_THROWS_AS((void)syncnorm::allgather_async(comm, in, std::span{out}), syncnorm::invalid_argument_error);
    CHECK_THROWS_AS((void)syncnorm::allreduce_async(comm, in, std::span{out}.first(2)),
                    syncnorm::invalid_argument_error);
  }
  for (int const root : {-1, syncnorm::size(comm)}) {
    CHECK_THROWS_AS(syncnorm::broadcast(comm, std::span{out}, root), syncnorm::invalid_argument_error);
    CHECK_THROWS_AS(syncnorm::scatter(comm, in, std::span{out}, root), syncnorm::invalid_argument_error);
    CHECK_THROWS_AS(syncnorm::reduce(comm, in, std::span{out}.first(3), root), syncnorm::invalid_argument_error);
  }
  check_allgather<float>(comm, 3, 1);
}

/// barrier, broadcast, scatter and reduce, be they the communicator's own or made of allgather and allreduce.
template <class C>
void check_derived(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  syncnorm::barrier(comm);
  for (int root = 0; root < size; ++root) {
    for (auto const extent : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{3000}}) {
      INFO("root ", root, ", extent ", extent, ", rank ", rank, " of ", size);
      auto data = rank == root ? values<double>(root, extent, 3) : std::vector<double>(extent, poison<double>());
      syncnorm::broadcast(comm, std::span{data}, root);
      CHECK((data == values<double>(root, extent, 3)));

      auto const blocks = rank == root ? gathered<std::int64_t>(size, extent, 4) : std::vector<std::int64_t>{};
      std::vector<std::int64_t> own(extent, poison<std::int64_t>());
      syncnorm::scatter(comm, blocks, std::span{own}, root);
      CHECK((own == values<std::int64_t>(rank, extent, 4)));

      for (auto const op : ops) {
        std::vector<float> out(rank == root ? extent : 0, poison<float>());
        syncnorm::reduce(comm, values<float>(rank, extent, 5), std::span{out}, root, op);
        if (rank == root) CHECK((out == reduced<float>(size, extent, 5, op)));
      }
    }
  }
  std::vector<std::byte> bytes = values<std::byte>(rank, 5, 6);
  syncnorm::broadcast(comm, std::span{bytes}, size - 1);
  CHECK((bytes == values<std::byte>(size - 1, 5, 6)));
  syncnorm::barrier(comm);
}

/// Operations of different kinds and types in flight together, waited for in another order than started.
template <class C>
void check_async(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  auto const ranks = static_cast<std::size_t>(size);
  for (int round = 0; round < 3; ++round) {
    auto const a_in = values<float>(rank, 1000, 1);
    auto const b_in = values<std::byte>(rank, 3, 2);
    auto const c_in = values<double>(rank, 17, 3);
    std::vector<float> a_out(1000 * ranks, poison<float>());
    std::vector<std::byte> b_out(3 * ranks, poison<std::byte>());
    std::vector<double> c_out(17, poison<double>());
    std::vector<std::int32_t> d_out = values<std::int32_t>(rank, large_in_flight, 4);
    std::vector<std::int64_t> e_in, e_out;

    auto a = syncnorm::allgather_async(comm, a_in, std::span{a_out});
    auto b = syncnorm::allgather_async(comm, b_in, std::span{b_out});
    auto c = syncnorm::allreduce_async(comm, c_in, std::span{c_out}, syncnorm::reduce_op::max);
    auto d = syncnorm::allreduce_async(comm, std::span<std::int32_t const>{d_out}, std::span{d_out});
    auto e = syncnorm::allgather_async(comm, e_in, std::span{e_out});
    if (round == 1) {
      d.wait();
      a.wait();
      e.wait();
    }
    while (round == 2 && !c.test()) std::this_thread::yield();
    e.wait();
    d.wait();
    c.wait();
    b.wait();
    a.wait();
    CHECK((a_out == gathered<float>(size, 1000, 1)));
    CHECK((b_out == gathered<std::byte>(size, 3, 2)));
    CHECK((c_out == reduced<double>(size, 17, 3, syncnorm::reduce_op::max)));
    CHECK((d_out == reduced<std::int32_t>(size, large_in_flight, 4, syncnorm::reduce_op::sum)));
    CHECK(a.test());
    CHECK(e.test());
    a.wait();
  }
}

template <class C>
void check_work_handles(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  auto const ranks = static_cast<std::size_t>(size);
  auto const in = values<float>(rank, 20, 7), other_in = values<float>(rank, 20, 8);
  std::vector<float> out(20 * ranks, poison<float>()), other_out(20 * ranks, poison<float>());

  {
    auto work = syncnorm::allgather_async(comm, in, std::span{out});
    auto moved = std::move(work);
    std::optional<decltype(moved)> kept{std::move(moved)};
    kept->wait();
    CHECK((out == gathered<float>(size, 20, 7)));
  }
  // A handle that is dropped or assigned over has waited: its buffers are free and hold the result.
  { [[maybe_unused]] auto const dropped = syncnorm::allgather_async(comm, other_in, std::span{other_out}); }
  CHECK((other_out == gathered<float>(size, 20, 8)));
  std::ranges::fill(out, poison<float>());
  std::ranges::fill(other_out, poison<float>());
  {
    auto work = syncnorm::allgather_async(comm, in, std::span{out});
    if constexpr (std::is_move_assignable_v<decltype(work)>) {
      work = syncnorm::allgather_async(comm, other_in, std::span{other_out});
      CHECK((out == gathered<float>(size, 20, 7)));
    } else {
      [[maybe_unused]] auto const next = syncnorm::allgather_async(comm, other_in, std::span{other_out});
    }
  }
  CHECK((out == gathered<float>(size, 20, 7)));
  CHECK((other_out == gathered<float>(size, 20, 8)));

  // Blocking operations may run while others are in flight, and many may be.
  std::vector<std::vector<float>> outs(40, std::vector<float>(20));
  {
    std::vector<decltype(syncnorm::allreduce_async(comm, in, std::span{outs[0]}))> works;
    for (auto& each : outs) works.push_back(syncnorm::allreduce_async(comm, in, std::span{each}));
    check_allgather<std::int32_t>(comm, 9, 9);
  }
  auto const sum = reduced<float>(size, 20, 7, syncnorm::reduce_op::sum);
  for (auto const& each : outs) CHECK((each == sum));
}

/// The ranks, in the numbering of `parent`, that `sub` consists of must be `expected`.
template <class Parent, class Sub>
void check_members(Parent const& parent, Sub const& sub, std::vector<std::int32_t> const& expected) {
  std::int32_t const own = syncnorm::rank(parent);
  CHECK(syncnorm::size(sub) == static_cast<int>(expected.size()));
  if (syncnorm::size(sub) != static_cast<int>(expected.size())) return;
  std::vector<std::int32_t> members(expected.size(), -1);
  syncnorm::allgather(sub, std::span{&own, 1}, std::span{members});
  CHECK((members == expected));
  CHECK(expected[static_cast<std::size_t>(syncnorm::rank(sub))] == own);
}

template <class C>
void check_split(C const& comm) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  std::vector<std::int32_t> same_parity, reversed;
  for (int r = rank % 2; r < size; r += 2) same_parity.push_back(r);
  for (int r = size - 1; r >= 0; --r) reversed.push_back(r);

  auto const parity = syncnorm::split(comm, rank % 2);
  check_members(comm, parity, same_parity);
  auto const single = syncnorm::split(comm, rank);
  check_members(comm, single, {rank});
  auto const backwards = syncnorm::split(comm, 5, -rank);
  check_members(comm, backwards, reversed);
  auto const copy = syncnorm::split(comm, 0);

  // Groups run independently: one does more operations than the other, and the parent works in between.
  for (int i = 0; i < 3 + 4 * (rank % 2); ++i) {
    check_allgather<float>(parity, 17, i);
    check_allreduce<double>(parity, 17, i, syncnorm::reduce_op::sum);
  }
  check_allgather<std::int32_t>(comm, 5, 1);
  check_allreduce<float>(single, 5, 2, syncnorm::reduce_op::max);
  check_derived(parity);
  check_same_bits<float>(backwards);

  auto const nested = syncnorm::split(parity, syncnorm::rank(parity) % 2, -syncnorm::rank(parity));
  std::vector<std::int32_t> nested_members;
  for (int r = syncnorm::rank(parity) % 2; r < syncnorm::size(parity); r += 2)
    nested_members.insert(nested_members.begin(), r);
  check_members(parity, nested, nested_members);
  if constexpr (syncnorm::async_communicator<C>) {
    check_async(nested);
    check_work_handles(parity);
  }
  check_allgather<std::byte>(copy, 1000, 3);
}

/// Every check of the contract. Collective over `comm`; takes well under a second on a fast communicator.
template <class C>
void check_contract(C const& comm) {
  static_assert(syncnorm::blocking_communicator<C>);
  CHECK(syncnorm::size(comm) >= 1);
  CHECK((syncnorm::rank(comm) >= 0 && syncnorm::rank(comm) < syncnorm::size(comm)));
  check_type<std::byte>(comm);
  check_type<float>(comm);
  check_type<double>(comm);
  check_type<std::int32_t>(comm);
  check_type<std::int64_t>(comm);
  check_large(comm);
  check_wide_values(comm);
  check_same_bits<float>(comm);
  check_same_bits<double>(comm);
  check_back_to_back(comm);
  check_extents(comm);
  check_derived(comm);
  if constexpr (syncnorm::async_communicator<C>) {
    check_async(comm);
    check_work_handles(comm);
  }
  if constexpr (syncnorm::splits<C>) check_split(comm);

  C const copy = comm; // a copy is the same communicator
  check_allgather<float>(copy, 3, 1);
  check_allgather<float>(comm, 3, 2);
}

} // namespace contract
