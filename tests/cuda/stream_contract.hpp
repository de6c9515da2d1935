#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>

#include "comm/contract.hpp"
#include "cuda/device_buffer.hpp"

/// The contract of collectives on a stream, of any communicator. Every rank calls it.
namespace stream_contract {

template <class T, class C>
void check_allgather(C const& comm, std::size_t extent, int salt, test::stream const& on, bool captured) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  INFO("allgather, extent ", extent, ", rank ", rank, " of ", size, std::string{captured ? ", captured" : ""});
  auto const expected = contract::gathered<T>(size, extent, salt);
  test::device_buffer<T> const in{contract::values<T>(rank, extent, salt)};
  std::vector<T> const poisoned(expected.size(), contract::poison<T>());
  auto own = poisoned;
  std::ranges::copy(in.get(), own.begin() + static_cast<std::ptrdiff_t>(extent) * rank);
  test::device_buffer<T> const out{poisoned}, all{own};
  test::meetings const between{comm};
  test::run_on(on, captured, [&](cudaStream_t stream) { syncnorm::allgather(comm, in.span(), out.span(), stream); });
  CHECK((out.get() == expected));

  auto const part = all.span().subspan(extent * static_cast<std::size_t>(rank), extent);
  test::run_on(on, captured, [&](cudaStream_t stream) { syncnorm::allgather(comm, part, all.span(), stream); });
  CHECK((all.get() == expected));
}

template <class T, class C>
void check_allreduce(C const& comm, std::size_t extent, int salt, syncnorm::reduce_op op, test::stream const& on,
                     bool captured) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  INFO("allreduce, extent ", extent, ", rank ", rank, " of ", size, std::string{captured ? ", captured" : ""});
  auto const expected = contract::reduced<T>(size, extent, salt, op);
  test::device_buffer<T> const in{contract::values<T>(rank, extent, salt)};
  test::device_buffer<T> const out{std::vector<T>(extent, contract::poison<T>())};
  test::meetings const between{comm};
  test::run_on(on, captured, [&](cudaStream_t stream) {
    syncnorm::allreduce(comm, in.span(), out.span(), op, stream);
    syncnorm::allreduce(comm, in.span(), in.span(), op, stream);
  });
  CHECK((out.get() == expected));
  CHECK((in.get() == expected));
}

template <class T, class C>
void check_type(C const& comm, test::stream const& on, bool captured) {
  int salt = 0;
  for (auto const extent : {std::size_t{0}, std::size_t{1}, std::size_t{1000}}) {
    check_allgather<T>(comm, extent, ++salt, on, captured);
    if constexpr (syncnorm::reducible_type<T>)
      for (auto const op : contract::ops) check_allreduce<T>(comm, extent, ++salt, op, on, captured);
  }
}

template <class C>
void check_contract(C const& comm, bool captured) {
  static_assert(syncnorm::stream_communicator<C>);
  test::stream const on;
  check_type<std::byte>(comm, on, captured);
  check_type<float>(comm, on, captured);
  check_type<double>(comm, on, captured);
  check_type<std::int32_t>(comm, on, captured);
  check_type<std::int64_t>(comm, on, captured);

  // Many in a row, on one stream and then on another, without a wait in between.
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm);
  std::vector<test::device_buffer<float>> in, out;
  for (int i = 0; i < 20; ++i) {
    auto const extent = static_cast<std::size_t>(i * 7 % 41);
    in.emplace_back(contract::values<float>(rank, extent, i));
    out.emplace_back(extent * static_cast<std::size_t>(size));
  }
  test::meetings const between{comm};
  test::run_on(on, captured, [&](cudaStream_t stream) {
    for (std::size_t i = 0; i < in.size(); ++i) syncnorm::allgather(comm, in[i].span(), out[i].span(), stream);
  });
  for (std::size_t i = 0; i < in.size(); ++i)
    CHECK((out[i].get() == contract::gathered<float>(size, in[i].size(), static_cast<int>(i))));
  test::stream const other;
  check_allgather<double>(comm, 17, 5, other, captured);

  CHECK_THROWS_AS(syncnorm::allgather(comm, in[1].span(), out[2].span(), other), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(syncnorm::allreduce(comm, in[1].span(), out[2].span(), syncnorm::reduce_op::sum,
                                      static_cast<cudaStream_t>(other)),
                  syncnorm::invalid_argument_error);
  check_allgather<double>(comm, 3, 6, on, captured); // nothing was sent
}

} // namespace stream_contract
