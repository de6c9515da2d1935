#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"

namespace bench {

/// Where the ranks of a program's rows come from.
template <class CommOf>
struct rank_source {
  std::string name; ///< row_key::comm
  int ranks = 1;
  CommOf comm_of;           ///< rank → communicator; of the one rank that this process is, unless rank_threads > 1
  int rank_threads = 1;     ///< as row::rank_threads
  std::int64_t steps = 200; ///< of one measurement of a small shape
  /// Further contenders of a small row, given its key and the bytes per rank of its exchanges.
  std::function<std::vector<contender>(row_key const&, std::size_t)> more = {};
};

/// Bytes per rank of one exchange of statistics: a header, and two values in double for each channel.
[[nodiscard]] inline std::size_t exchange_bytes(std::int64_t channels) {
  return sizeof(syncnorm::detail::packet_header) + 2 * sizeof(double) * static_cast<std::size_t>(channels);
}

/// The exchanges of so many passes with nothing around them.
template <class CommOf>
[[nodiscard]] contender::step exchange_step(rank_source<CommOf> const& source, std::size_t bytes, int passes) {
  struct member {
    std::invoke_result_t<CommOf const&, int> comm;
    std::vector<std::byte> in, out;
  };
  std::vector<std::shared_ptr<member>> members;
  for (int r = 0; r < source.rank_threads; ++r) {
    auto const all = bytes * static_cast<std::size_t>(source.ranks);
    members.push_back(std::make_shared<member>(
        member{source.comm_of(r), std::vector<std::byte>(bytes), std::vector<std::byte>(all)}));
  }
  return [members, passes](int rank) {
    auto& own = *members[static_cast<std::size_t>(rank)];
    for (int pass = 0; pass < passes; ++pass)
      syncnorm::allgather(own.comm, std::span<std::byte const>{own.in}, std::span{own.out});
  };
}

/// Large shapes, whose arithmetic dwarfs the exchange.
template <class CommOf>
void add_large_rows(std::vector<row>& rows, settings const& how, rank_source<CommOf> const& source) {
  std::vector<std::pair<std::string, std::array<std::int64_t, 3>>> const all{
      {"NCHW", {32, 256, 3136}}, {"NCHW", {32, 64, 12544}}, {"NCHW", {32, 512, 784}}, {"NHWC", {32, 256, 3136}}};
  for (auto const& [layout, shape] : all) {
    for (char const* op : {"forward", "backward"}) {
      row_key const key{op, layout, "float", shape, source.name, source.ranks, 1};
      auto const make = [=] {
        return rank_contenders<float>(key, make_tensors<float>(key, source.rank_threads), source.comm_of);
      };
      rows.push_back({key, floor_bytes<float>(key), make, source.rank_threads});
    }
    if (how.quick) return;
  }
}

/// Small shapes, whose time is that of the exchanges.
template <class CommOf>
void add_small_row(std::vector<row>& rows, rank_source<CommOf> const& source, std::int64_t batch,
                   std::int64_t channels) {
  row_key const key{"forward+backward", "NC", "float", {batch, channels, 1}, source.name, source.ranks, 1};
  auto const make = [=] {
    auto contenders = rank_contenders<float>(key, make_tensors<float>(key, source.rank_threads), source.comm_of);
    auto const bytes = exchange_bytes(channels);
    contenders.push_back({"exchange", [=] { return exchange_step(source, bytes, 2); }});
    if (source.more)
      for (auto& each : source.more(key, bytes)) contenders.push_back(std::move(each));
    for (auto& each : contenders) each.iterations = source.steps;
    return contenders;
  };
  rows.push_back({key, floor_bytes<float>(key), make, source.rank_threads});
}

/// The grid of the homework's tests.
template <class CommOf>
void add_grid_rows(std::vector<row>& rows, settings const& how, rank_source<CommOf> const& source) {
  for (std::int64_t const channels : {128, 256, 512, 1024})
    for (std::int64_t const batch : {32, 64})
      if (!how.quick || batch == 32) add_small_row(rows, source, batch, channels);
}

/// What gathering and reducing take where channels are many; each pass by itself unless the run is to be quick.
template <class CommOf>
void add_policy_rows(std::vector<row>& rows, settings const& how, rank_source<CommOf> const& source) {
  std::vector<std::string> const passes =
      how.quick ? std::vector<std::string>{"forward+backward"} : std::vector<std::string>{"forward", "backward"};
  std::vector<std::int64_t> const extents =
      how.quick ? std::vector<std::int64_t>{1024, 16384} : std::vector<std::int64_t>{256, 1024, 4096, 16384};
  for (std::int64_t const channels : extents)
    for (char const* policy : {"+gather", "+reduce"})
      for (auto const& pass : passes) {
        row_key const key{pass + policy, "NC", "float", {8, channels, 1}, source.name, source.ranks, 1};
        auto const make = [=] {
          auto contenders = rank_contenders<float>(key, make_tensors<float>(key, source.rank_threads), source.comm_of);
          for (auto& each : contenders) each.iterations = source.steps;
          return contenders;
        };
        rows.push_back({key, floor_bytes<float>(key), make, source.rank_threads});
      }
}

/// The shape by which numbers of ranks are compared.
template <class CommOf>
void add_scaling_row(std::vector<row>& rows, rank_source<CommOf> const& source) {
  add_small_row(rows, source, 64, 256);
}

} // namespace bench
