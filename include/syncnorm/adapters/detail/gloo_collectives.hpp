#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

#include <syncnorm/adapters/detail/collective_header.hpp>
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

inline void copy_bytes(std::byte* to, std::byte const* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// Puts what was announced in `slot.bulk`, one buffer per peer in the order of for_each_peer, among what is pending.
inline void await_bulk(gloo_channel const& channel, gloo_slot& slot, std::size_t first = 0) {
  channel.for_each_peer([&](int r) {
    slot.pending.push_back({slot.bulk[first++].get(), r, gloo_transfer::kind::receive});
  });
}

inline bool complete(gloo_channel&, gloo_slot&) { return true; }

inline slot_ptr allgather(gloo_channel& channel, collective_header header, std::span<std::byte const> in,
                          std::span<std::byte> out) {
  auto slot = channel.open(in, out);
  if (in.size() <= channel.capacity()) {
    channel.send(*slot, header, in, [](gloo_channel& c, gloo_slot& s) {
      auto const bytes = bytes_of(agreed_header(c, s));
      for (int r = 0; r < c.size(); ++r) copy_bytes(block(s.out, bytes, r).data(), c.data_of(s, r), bytes);
      return true;
    });
    return slot;
  }
  channel.for_each_peer([&](int r) { channel.announce_bulk(*slot, 1, r, block(out.data(), in.size(), r)); });
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    auto const bytes = bytes_of(agreed_header(c, s));
    await_bulk(c, s);
    c.for_each_peer([&](int r) { c.send_bulk(s, 1, r, {s.in, bytes}); });
    copy_bytes(block(s.out, bytes, c.rank()).data(), s.in, bytes);
    s.resume = complete;
    return false;
  });
  return slot;
}

/// The part of `n` elements that rank `r` reduces.
template <class T>
std::span<T> share(T* all, std::size_t n, int r, int size) {
  auto const first = n * static_cast<std::size_t>(r) / static_cast<std::size_t>(size);
  auto const last = n * static_cast<std::size_t>(r + 1) / static_cast<std::size_t>(size);
  return {all + first, last - first};
}

template <reducible_type T>
bool fold_packets(gloo_channel& c, gloo_slot& s) {
  auto const agreed = agreed_header(c, s);
  std::span<T> const result{reinterpret_cast<T*>(s.out), bytes_of(agreed) / sizeof(T)};
  fold_in_rank_order(result, c.size(), agreed.called.op,
                     [&](int r) { return reinterpret_cast<T const*>(c.data_of(s, r)); });
  return true;
}

template <reducible_type T>
bool fold_share(gloo_channel& c, gloo_slot& s) {
  auto const agreed = c.header_of(s, c.rank());
  auto const n = bytes_of(agreed) / sizeof(T);
  auto const own = share(reinterpret_cast<T*>(s.out), n, c.rank(), c.size());
  auto const own_in = share(reinterpret_cast<T const*>(s.in), n, c.rank(), c.size());
  fold_in_rank_order(own, c.size(), agreed.called.op, [&](int r) {
    if (r == c.rank()) return own_in.data();
    return reinterpret_cast<T const*>(block(s.scratch.data(), own.size_bytes(), r).data());
  });
  await_bulk(c, s, static_cast<std::size_t>(c.size() - 1));
  c.for_each_peer([&](int r) { c.send_bulk(s, 2, r, std::as_bytes(own)); });
  s.resume = complete;
  return false;
}

template <reducible_type T>
bool send_shares(gloo_channel& c, gloo_slot& s) {
  auto const n = bytes_of(agreed_header(c, s)) / sizeof(T);
  await_bulk(c, s);
  c.for_each_peer(
      [&](int r) { c.send_bulk(s, 1, r, std::as_bytes(share(reinterpret_cast<T const*>(s.in), n, r, c.size()))); });
  s.resume = fold_share<T>;
  return false;
}

/// Every rank folds its share of all contributions in rank order and sends the result to all. So the bits are those of
/// the rank-order fold of the whole, whatever the extent.
template <reducible_type T>
slot_ptr allreduce(gloo_channel& channel, collective_header header, std::span<T const> in, std::span<T> out) {
  auto slot = channel.open(std::as_bytes(in), std::as_writable_bytes(out));
  if (in.size_bytes() <= channel.capacity()) {
    channel.send(*slot, header, std::as_bytes(in), fold_packets<T>);
    return slot;
  }
  auto const own_bytes = share(out.data(), out.size(), channel.rank(), channel.size()).size_bytes();
  slot->scratch.resize(own_bytes * static_cast<std::size_t>(channel.size()));
  channel.for_each_peer([&](int r) { channel.announce_bulk(*slot, 1, r, block(slot->scratch.data(), own_bytes, r)); });
  // Nothing arrives here before the peer has this rank's contribution to it, so `in` may be `out`.
  channel.for_each_peer([&](int r) {
    channel.announce_bulk(*slot, 2, r, std::as_writable_bytes(share(out.data(), out.size(), r, channel.size())));
  });
  channel.send(*slot, header, {}, send_shares<T>);
  return slot;
}

inline slot_ptr broadcast(gloo_channel& channel, collective_header header, std::span<std::byte> data) {
  bool const is_root = channel.rank() == header.called.root;
  auto slot = channel.open(data, data);
  if (data.size() <= channel.capacity()) {
    auto const sent = is_root ? std::span<std::byte const>{data} : std::span<std::byte const>{};
    channel.send(*slot, header, sent, [](gloo_channel& c, gloo_slot& s) {
      auto const agreed = agreed_header(c, s);
      copy_bytes(s.out, c.data_of(s, agreed.called.root), bytes_of(agreed));
      return true;
    });
    return slot;
  }
  if (!is_root) channel.announce_bulk(*slot, 1, header.called.root, data);
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    auto const agreed = agreed_header(c, s);
    if (c.rank() == agreed.called.root)
      c.for_each_peer([&](int r) { c.send_bulk(s, 1, r, {s.in, bytes_of(agreed)}); });
    else
      s.pending.push_back({s.bulk.front().get(), agreed.called.root, gloo_transfer::kind::receive});
    s.resume = complete;
    return false;
  });
  return slot;
}

inline slot_ptr scatter(gloo_channel& channel, collective_header header, std::span<std::byte const> in,
                        std::span<std::byte> out) {
  auto slot = channel.open(in, out);
  if (channel.rank() != header.called.root) channel.announce_bulk(*slot, 1, header.called.root, out);
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    auto const agreed = agreed_header(c, s);
    auto const part = [&](int r) { return s.in + bytes_of(agreed) * static_cast<std::size_t>(r); };
    if (c.rank() == agreed.called.root) {
      c.for_each_peer([&](int r) { c.send_bulk(s, 1, r, {part(r), bytes_of(agreed)}); });
      copy_bytes(s.out, part(c.rank()), bytes_of(agreed));
    } else {
      s.pending.push_back({s.bulk.front().get(), agreed.called.root, gloo_transfer::kind::receive});
    }
    s.resume = complete;
    return false;
  });
  return slot;
}

inline slot_ptr barrier(gloo_channel& channel, collective_header header) {
  auto slot = channel.open({}, {});
  channel.send(*slot, header, {}, [](gloo_channel& c, gloo_slot& s) {
    agreed_header(c, s);
    return true;
  });
  return slot;
}

} // namespace syncnorm::detail::gloo_collectives
