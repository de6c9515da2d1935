#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/gloo_channel.hpp>
#include <syncnorm/adapters/detail/rank_order.hpp>
#include <syncnorm/comm/wire.hpp>

// The collectives over a gloo_channel of two ranks or more. Each starts the operation; the channel drives it.
namespace syncnorm::detail::gloo_collectives {

using slot_ptr = std::unique_ptr<gloo_slot>;

inline collective_header agreed_header(gloo_channel const& channel, gloo_slot const& slot) {
  require_agreement(channel.size(), [&](int r) { return channel.header_of(slot, r); });
  return channel.header_of(slot, channel.rank());
}

inline std::span<std::byte> block(std::byte* all, std::size_t bytes, int rank) {
  return {all + bytes * static_cast<std::size_t>(rank), bytes};
}

// Phases of bulk data and of the signals behind them, and of the signal that answers the last data.
inline constexpr int first = 1, second = 2, answer = 3;

inline std::size_t peers(gloo_channel const& channel) { return static_cast<std::size_t>(channel.size() - 1); }

inline void await_all(gloo_channel& c, gloo_slot& s) {
  c.for_each_peer([&](int r) { c.await(s, r); });
}

/// Every peer has answered, so that what was sent to them is theirs.
inline bool collect_sends(gloo_channel& c, gloo_slot& s) {
  c.collect_sends(s, peers(c));
  return true;
}

/// The signals behind the last data of every peer are here: tells them so, and waits to be told.
inline bool answer_all(gloo_channel& c, gloo_slot& s) {
  c.collect_receives(s, peers(c));
  c.for_each_peer([&](int r) { c.send_signal(s, answer, r); });
  await_all(c, s);
  s.resume = collect_sends;
  return false;
}

inline slot_ptr allgather(gloo_channel& channel, collective_header const& header, std::span<std::byte const> in,
                          std::span<std::byte> out) {
  auto slot = channel.open(header.called, in, out);
  if (in.size() <= channel.capacity()) {
    channel.send(*slot, header, in, [](gloo_channel& c, gloo_slot& s) {
      auto const bytes = bytes_of(agreed_header(c, s));
      for (int r = 0; r < c.size(); ++r) copy_bytes(block(s.out, bytes, r).data(), c.data_of(s, r), bytes);
      return true;
    });
    return slot;
  }
  channel.for_each_peer([&](int r) {
    channel.announce_bulk(*slot, first, r, block(out.data(), in.size(), r));
    channel.announce_signal(*slot, answer, r);
  });
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    auto const bytes = bytes_of(agreed_header(c, s));
    c.for_each_peer([&](int r) { c.send_bulk(s, first, r, {s.in, bytes}); });
    copy_bytes(block(s.out, bytes, c.rank()).data(), s.in, bytes);
    await_all(c, s);
    s.resume = answer_all;
    return false;
  });
  return slot;
}

/// The part of `n` elements that rank `r` reduces.
template <class T>
std::span<T> share(T* all, std::size_t n, int r, int size) {
  auto const begin = n * static_cast<std::size_t>(r) / static_cast<std::size_t>(size);
  auto const end = n * static_cast<std::size_t>(r + 1) / static_cast<std::size_t>(size);
  return {all + begin, end - begin};
}

template <reducible_type T>
bool fold_packets(gloo_channel& c, gloo_slot& s) {
  auto const agreed = agreed_header(c, s);
  std::span<T> const result{reinterpret_cast<T*>(s.out), bytes_of(agreed) / sizeof(T)};
  fold_in_rank_order(result, c.size(), agreed.called.op,
                     [&](int r) { return reinterpret_cast<T const*>(c.data_of(s, r)); });
  return true;
}

/// Every contribution to this rank's share is here: folds them, and sends the result to every peer.
template <reducible_type T>
bool fold_share(gloo_channel& c, gloo_slot& s) {
  c.collect_receives(s, peers(c));
  auto const agreed = c.header_of(s, c.rank());
  auto const n = bytes_of(agreed) / sizeof(T);
  auto const own = share(reinterpret_cast<T*>(s.out), n, c.rank(), c.size());
  auto const own_in = share(reinterpret_cast<T const*>(s.in), n, c.rank(), c.size());
  fold_in_rank_order(own, c.size(), agreed.called.op, [&](int r) {
    if (r == c.rank()) return own_in.data();
    return reinterpret_cast<T const*>(block(s.scratch.data(), own.size_bytes(), r).data());
  });
  c.for_each_peer([&](int r) { c.send_bulk(s, second, r, std::as_bytes(own)); });
  await_all(c, s);
  s.resume = [](gloo_channel& channel, gloo_slot& slot) {
    channel.collect_sends(slot, peers(channel)); // who sends a result has had this rank's contribution to it
    return answer_all(channel, slot);
  };
  return false;
}

template <reducible_type T>
bool send_shares(gloo_channel& c, gloo_slot& s) {
  auto const n = bytes_of(agreed_header(c, s)) / sizeof(T);
  c.for_each_peer(
      [&](int r) { c.send_bulk(s, first, r, std::as_bytes(share(reinterpret_cast<T const*>(s.in), n, r, c.size()))); });
  await_all(c, s);
  s.resume = fold_share<T>;
  return false;
}

/// Every rank folds its share of all contributions in rank order and sends the result to all. So the bits are those of
/// the rank-order fold of the whole, whatever the extent.
template <reducible_type T>
slot_ptr allreduce(gloo_channel& channel, collective_header const& header, std::span<T const> in, std::span<T> out) {
  auto slot = channel.open(header.called, std::as_bytes(in), std::as_writable_bytes(out));
  if (in.size_bytes() <= channel.capacity()) {
    channel.send(*slot, header, std::as_bytes(in), fold_packets<T>);
    return slot;
  }
  auto const own_bytes = share(out.data(), out.size(), channel.rank(), channel.size()).size_bytes();
  auto* const scratch = channel.scratch(*slot, own_bytes * static_cast<std::size_t>(channel.size()));
  channel.for_each_peer([&](int r) { channel.announce_bulk(*slot, first, r, block(scratch, own_bytes, r)); });
  // Nothing arrives here before the peer has this rank's contribution to it, so `in` may be `out`.
  channel.for_each_peer([&](int r) {
    auto const result = share(out.data(), out.size(), r, channel.size());
    channel.announce_bulk(*slot, second, r, std::as_writable_bytes(result));
    channel.announce_signal(*slot, answer, r);
  });
  channel.send(*slot, header, {}, send_shares<T>);
  return slot;
}

/// The root sends part(agreed header, r) to every rank r, and waits for their answers; they wait for the data.
template <class Part>
bool distribute(gloo_channel& c, gloo_slot& s, Part part) {
  auto const agreed = agreed_header(c, s);
  if (c.rank() == agreed.called.root) {
    c.for_each_peer([&](int r) { c.send_bulk(s, first, r, part(agreed, r)); });
    await_all(c, s);
    s.resume = collect_sends;
    return false;
  }
  c.await(s, agreed.called.root);
  s.resume = [](gloo_channel& channel, gloo_slot& slot) {
    channel.collect_receives(slot, 1);
    channel.send_signal(slot, answer, channel.header_of(slot, channel.rank()).called.root);
    return true;
  };
  return false;
}

inline void announce_distribution(gloo_channel& channel, gloo_slot& slot, int root, std::span<std::byte> to) {
  if (channel.rank() != root) return channel.announce_bulk(slot, first, root, to);
  channel.for_each_peer([&](int r) { channel.announce_signal(slot, answer, r); });
}

inline slot_ptr broadcast(gloo_channel& channel, collective_header const& header, std::span<std::byte> data) {
  auto slot = channel.open(header.called, data, data);
  auto const root = header.called.root;
  if (data.size() <= channel.capacity()) {
    auto const sent = channel.rank() == root ? std::span<std::byte const>{data} : std::span<std::byte const>{};
    channel.send(*slot, header, sent, [](gloo_channel& c, gloo_slot& s) {
      auto const agreed = agreed_header(c, s);
      copy_bytes(s.out, c.data_of(s, agreed.called.root), bytes_of(agreed));
      return true;
    });
    return slot;
  }
  announce_distribution(channel, *slot, root, data);
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    return distribute(c, s, [&](collective_header const& agreed, int) { return std::span{s.in, bytes_of(agreed)}; });
  });
  return slot;
}

inline slot_ptr scatter(gloo_channel& channel, collective_header const& header, std::span<std::byte const> in,
                        std::span<std::byte> out) {
  auto slot = channel.open(header.called, in, out);
  announce_distribution(channel, *slot, header.called.root, out);
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    auto const part = [&](collective_header const& agreed, int r) {
      return std::span{s.in + bytes_of(agreed) * static_cast<std::size_t>(r), bytes_of(agreed)};
    };
    bool const complete = distribute(c, s, part);
    auto const agreed = c.header_of(s, c.rank());
    if (c.rank() == agreed.called.root) copy_bytes(s.out, part(agreed, c.rank()).data(), bytes_of(agreed));
    return complete;
  });
  return slot;
}

inline slot_ptr barrier(gloo_channel& channel, collective_header const& header) {
  auto slot = channel.open(header.called, {}, {});
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    agreed_header(c, s);
    return true;
  });
  return slot;
}

} // namespace syncnorm::detail::gloo_collectives
