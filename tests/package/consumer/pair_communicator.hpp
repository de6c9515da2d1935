#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/socket.h>

#include <syncnorm/comm/communicator.hpp>

// A communicator of this project's own: two processes at the two ends of a stream socket.
class pair_communicator {
public:
  pair_communicator(int rank, int socket) : rank_{rank}, socket_{socket} {}

  int rank() const { return rank_; }
  int size() const { return 2; }

  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    auto const mine = out.subspan(in.size() * static_cast<std::size_t>(rank_), in.size());
    auto const theirs = out.subspan(in.size() * static_cast<std::size_t>(1 - rank_), in.size());
    if (in.data() != mine.data()) std::ranges::copy(in, mine.begin());
    for (int sender = 0; sender < 2; ++sender)
      if (sender == rank_)
        transfer(std::as_bytes(in), [](auto... to) { return send(to..., MSG_NOSIGNAL); });
      else
        transfer(std::as_writable_bytes(theirs), [](auto... to) { return recv(to..., 0); });
  }

private:
  template <class Bytes, class Call>
  void transfer(Bytes bytes, Call call) const {
    while (!bytes.empty()) {
      auto const moved = call(socket_, bytes.data(), bytes.size());
      if (moved <= 0) throw syncnorm::communicator_error{"pair", "the other end is gone", errno};
      bytes = bytes.subspan(static_cast<std::size_t>(moved));
    }
  }

  int rank_, socket_;
};
