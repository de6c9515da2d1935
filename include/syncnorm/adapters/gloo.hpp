#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gloo/context.h>

#include <syncnorm/adapters/detail/channel_work.hpp>
#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/gloo_channel.hpp>
#include <syncnorm/adapters/detail/gloo_collectives.hpp>
#include <syncnorm/adapters/detail/gloo_mesh.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/require_rank.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/comm/wire.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// The work of a collective over Gloo.
using gloo_work = detail::channel_work<detail::gloo_channel, detail::gloo_slot>;

/// The communicator of a connected gloo::Context.
///
/// Every rank exchanges packets with every other directly, announced ahead, which takes one trip where Gloo's own
/// collectives take two or more. Reductions fold the contributions in rank order, so the bits depend neither on the
/// extent nor on timing. Ranks that call different collectives, or with different extents, types or roots, all get the
/// same mismatch_error, and the communicator works on.
///
/// The context may be shared with other users of Gloo; the tags are disjoint from theirs. A failure or a timeout closes
/// its connections, as Gloo's own timeouts do, so that every rank that waits for this one to join a collective fails at
/// once, whoever else it waits for. One that has all from it already does not take that for a failure, as a rank may also
/// have ended after its last collective.
/// The last copy waits until all that it has sent is under way, for the timeout at most, which ends the context's connections, too.
/// `split` gives a communicator with connections of its own. What a communicator has announced stays in the context, some KB for each
/// that is made. A process whose SIGPIPE has the default action ignores it from here on, because writing to a
/// dead peer would otherwise end the process.
class gloo_communicator {
public:
  /// Local, but every rank must make its communicators of one context in the same order, as each takes the context's
  /// next slot for its tag. An explicit `tag`, below 2^23, must never be used twice with one context, one after the other
  /// included. Throws invalid_argument_error where the context is null, the timeout is not positive, or the tag is too large;
  /// gloo_error where the context is not connected.
  explicit gloo_communicator(std::shared_ptr<gloo::Context> context,
                             std::chrono::milliseconds timeout = default_timeout,
                             std::optional<std::uint32_t> tag = std::nullopt) {
    if (!context) throw invalid_argument_error{"gloo_communicator: the context is null"};
    timeout = detail::checked_timeout("gloo_communicator", timeout);
    if (tag && *tag >= 0x80'0000u)
      throw invalid_argument_error{"gloo_communicator: the tag " + std::to_string(*tag) + " is not below 2^23"};
    auto const own_tag = tag ? *tag : 0x80'0000u | static_cast<std::uint32_t>(context->nextSlot());
    channel_ = std::make_shared<detail::gloo_channel>(std::move(context), timeout, own_tag);
  }

  [[nodiscard]] int rank() const noexcept { return channel_->rank(); }
  [[nodiscard]] int size() const noexcept { return channel_->size(); }
  [[nodiscard]] double exchange_overhead() const noexcept { return 5e-5; }
  [[nodiscard]] exchange_cost cost_of_exchange() const noexcept { return {.latency = 3e-5, .bandwidth = 1e9}; }
  [[nodiscard]] std::shared_ptr<gloo::Context> const& context() const noexcept { return channel_->context(); }
  /// Up to so many bytes per rank travel in one trip. More take three, and an allreduce four; a scatter takes three of any.
  [[nodiscard]] std::size_t eager_bytes() const noexcept { return channel_->capacity(); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    start_allgather(in, out).wait();
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    start_allreduce(in, out, op).wait();
  }

  template <wire_type T>
  [[nodiscard]] gloo_work allgather_async(std::span<T const> in, std::span<T> out) const {
    return in_background(start_allgather(in, out), in.size_bytes());
  }
  template <reducible_type T>
  [[nodiscard]] gloo_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    return in_background(start_allreduce(in, out, op), in.size_bytes());
  }

  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    detail::require_rank(root, size());
    if (size() == 1) return;
    auto const said = detail::make_header<T>(detail::collective_kind::broadcast, data.size(), root);
    started(detail::gloo_collectives::broadcast(*channel_, said, std::as_writable_bytes(data))).wait();
  }
  template <wire_type T>
  void scatter(std::span<T const> in, std::span<T> out, int root) const {
    detail::require_rank(root, size());
    if (size() == 1) {
      detail::require_allgather_extents(out.size(), in.size(), 1);
      return copied(in, out).wait();
    }
    auto said = detail::make_header<T>(detail::collective_kind::scatter, out.size(), root);
    if (rank() == root) said.root_extent = static_cast<std::int64_t>(in.size());
    started(detail::gloo_collectives::scatter(*channel_, said, std::as_bytes(in), std::as_writable_bytes(out))).wait();
  }
  void barrier() const {
    if (size() > 1) started(detail::gloo_collectives::barrier(*channel_, {})).wait();
  }

  /// The communicator of the ranks that give the same colour, in the order of (key, rank). It has a context and
  /// connections of its own. Collective. Throws gloo_error where these cannot be had.
  [[nodiscard]] gloo_communicator split(int color, int key) const;

  /// Closes the connections of the context, so that this rank, and every rank that waits for it, fails at once. The one
  /// member that another thread may call.
  void abort() const { channel_->fail("aborted on rank " + std::to_string(rank())); }

private:
  template <wire_type T>
  gloo_work start_allgather(std::span<T const> in, std::span<T> out) const {
    if (size() == 1) return copied(in, out);
    return started(detail::gloo_collectives::allgather(
        *channel_, detail::make_header<T>(detail::collective_kind::allgather, in.size()), std::as_bytes(in),
        std::as_writable_bytes(out)));
  }
  template <reducible_type T>
  gloo_work start_allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    if (size() == 1) return copied(in, out);
    auto const said = detail::make_header<T>(detail::collective_kind::allreduce, in.size(), -1, op);
    return started(detail::gloo_collectives::allreduce<T>(*channel_, said, in, out));
  }
  gloo_work in_background(gloo_work work, std::size_t bytes) const {
    if (size() > 1 && bytes > eager_bytes()) channel_->drive_in_background(work.slot());
    return work;
  }
  gloo_work started(std::unique_ptr<detail::gloo_slot> slot) const { return {channel_, std::move(slot)}; }
  template <class T>
  static gloo_work copied(std::span<T const> in, std::span<T> out) {
    if (in.data() != out.data()) std::ranges::copy(in, out.begin());
    return {};
  }

  std::shared_ptr<detail::gloo_channel> channel_;
};

inline gloo_communicator gloo_communicator::split(int color, int key) const {
  std::vector<std::array<std::int32_t, 2>> wishes(static_cast<std::size_t>(size()));
  wishes[static_cast<std::size_t>(rank())] = {color, key};
  auto const flat = std::span{wishes.front().data(), wishes.size() * 2};
  allgather<std::int32_t>(flat.subspan(static_cast<std::size_t>(rank()) * 2, 2), flat);

  std::vector<int> members;
  for (int r = 0; r < size(); ++r)
    if (wishes[static_cast<std::size_t>(r)][0] == color) members.push_back(r);
  std::ranges::stable_sort(members, {}, [&](int r) { return wishes[static_cast<std::size_t>(r)][1]; });
  auto const own = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
  auto const ranks = static_cast<int>(members.size());

  // Each rank says where each other rank is to connect to. One that cannot says nothing, so that all learn of it.
  constexpr std::size_t address_bytes = gloo::transport::Address::kMaxByteSize;
  using address = std::array<std::byte, address_bytes>;
  auto const all = static_cast<std::size_t>(size());
  std::vector<address> addresses(all * all);
  auto const row = std::span{addresses}.subspan(all * static_cast<std::size_t>(rank()), all);
  std::shared_ptr<detail::gloo_mesh> mesh;
  std::string problem;
  std::size_t length = 0;
  try {
    auto device = size() > 1 ? channel_->context()->getDevice() : nullptr;
    mesh = std::make_shared<detail::gloo_mesh>(own, ranks, std::move(device), channel_->timeout());
    for (int i = 0; i < ranks; ++i) {
      if (i == own) continue;
      auto const bytes = mesh->address_for(i);
      length = bytes.size();
      std::ranges::copy(std::as_bytes(std::span{bytes}),
                        row[static_cast<std::size_t>(members[static_cast<std::size_t>(i)])].begin());
    }
  } catch (std::exception const& failure) {
    mesh = nullptr;
    problem = failure.what();
  }
  auto const require_success = [&](char const* elsewhere) {
    std::int32_t succeeded = problem.empty() ? 1 : 0;
    allreduce<std::int32_t>({&succeeded, 1}, {&succeeded, 1}, reduce_op::min);
    if (succeeded == 0) throw gloo_error{"split: " + (problem.empty() ? elsewhere : problem)};
  };
  require_success("another rank could not listen");
  std::span<std::byte> const bytes{addresses.front().data(), addresses.size() * address_bytes};
  allgather<std::byte>(std::as_bytes(row), bytes);

  for (int i = 0; i < ranks; ++i) {
    if (i == own) continue;
    auto const peer = static_cast<std::size_t>(members[static_cast<std::size_t>(i)]);
    auto const& to = addresses[peer * all + static_cast<std::size_t>(rank())];
    auto const* first = reinterpret_cast<char const*>(to.data());
    try {
      mesh->connect(i, {first, first + length});
    } catch (std::exception const& failure) {
      problem = "connecting to rank " + std::to_string(peer) + ": " + failure.what();
      break;
    }
  }
  // No rank may have dropped its connections again while another is still making them.
  require_success("another rank could not connect");
  return gloo_communicator{std::move(mesh), channel_->timeout()};
}

} // namespace syncnorm
