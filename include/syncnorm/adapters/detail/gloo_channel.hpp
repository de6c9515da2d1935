#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gloo/context.h>

#include <syncnorm/adapters/detail/broken_pipe.hpp>
#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/gloo_driver.hpp>
#include <syncnorm/adapters/detail/gloo_slot.hpp>
#include <syncnorm/adapters/detail/lasting_failure.hpp>
#include <syncnorm/adapters/gloo_error.hpp>

namespace syncnorm::detail {

/// Exchanges packets between all ranks of a Gloo context.
///
/// Gloo moves data only when the receiver has announced its buffer. So the buffers of the next few packets are
/// announced ahead, and a packet that is sent arrives after one trip, moved by Gloo's own threads. A packet begins
/// with the header of the collective, followed by the data if they fit. What does not fit follows once every header
/// has been seen to agree: Gloo ends the process when a message is longer than the buffer announced for it.
///
/// When a connection breaks, Gloo tells it to the receives that were announced, but neither to a send that is queued nor
/// to a receive in the middle of its data. So an operation only ever waits for packets and for empty messages, called
/// signals. What else it needs has happened when the signal that was sent behind it is here, and is then collected.
///
/// Gloo's buffers can be waited for but not polled, and a wait that times out closes every connection. So the thread
/// that waits drives the operation, and the channel has a thread of its own, started when first needed, for those that
/// are tested, and for those that go on in several steps while their owner does something else.
class gloo_channel {
public:
  using clock = std::chrono::steady_clock;

  gloo_channel(std::shared_ptr<gloo::Context> context, std::chrono::milliseconds timeout, std::uint32_t tag)
      : context_{std::move(context)}, timeout_{timeout}, tag_{tag} {
    if (size() == 1) return;
    ignore_broken_pipes();
    guarded([&] {
      for_each_peer([&](int r) {
        if (!context_->getPair(r)) throw gloo_error{"the context has no connection to rank " + std::to_string(r)};
      });
    });
    connected_ = true;
    announce_ahead();
  }
  gloo_channel(gloo_channel const&) = delete;
  gloo_channel& operator=(gloo_channel const&) = delete;
  ~gloo_channel() {
    driver_.stop();
    if (failure_.has_happened()) return;
    // A queued send whose buffer is gone would block its connection, which may have other users; to give up ends what they have in flight.
    try {
      for (auto const& slot : free_) confirm_sends(*slot, timeout_);
    } catch (std::exception const&) { // the connection is broken
    }
  }

  [[nodiscard]] int rank() const noexcept { return context_->rank; }
  [[nodiscard]] int size() const noexcept { return context_->size; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  [[nodiscard]] std::shared_ptr<gloo::Context> const& context() const noexcept { return context_; }
  /// Bytes of data that travel with the header. The same on every rank.
  [[nodiscard]] std::size_t capacity() const noexcept { return stride() - sizeof(collective_header); }

  [[nodiscard]] collective_header header_of(gloo_slot const& slot, int rank) const {
    collective_header header;
    std::memcpy(&header, packet(slot, rank), sizeof header);
    return header;
  }
  [[nodiscard]] std::byte* data_of(gloo_slot const& slot, int rank) const {
    return packet(slot, rank) + sizeof(collective_header);
  }
  /// f(r) for every other rank, starting after this one, so that ranks do not all begin with rank 0.
  template <class F>
  void for_each_peer(F f) const {
    for (int i = 1; i < size(); ++i) f((rank() + i) % size());
  }

  /// The slot of the next collective. Its packet must be sent next.
  [[nodiscard]] std::unique_ptr<gloo_slot> open(signature const& called, std::span<std::byte const> in,
                                                std::span<std::byte> out) {
    require_usable();
    opened_ = called;
    if (announced_.empty()) guarded([&] { announce(); });
    auto slot = std::move(announced_.front());
    announced_.erase(announced_.begin());
    slot->deadline = clock::now() + timeout_;
    slot->queued = false;
    slot->done = false;
    slot->in = in.data();
    slot->out = out.data();
    return slot;
  }

  /// Sends `header` and `data` to every peer. When all their packets are here, `resume` continues the operation.
  void send(gloo_slot& slot, collective_header header, std::span<std::byte const> data, gloo_slot::step resume) {
    header.called.sequence = slot.sequence;
    header.all_received_below = closed_below_;
    std::memcpy(packet(slot, rank()), &header, sizeof header);
    copy_bytes(data_of(slot, rank()), data.data(), data.size());
    slot.resume = resume;
    guarded([&] {
      for_each_peer([&](int r) { send_own(slot, r, 0, sizeof header + data.size()); });
      slot.missing_packets = size() - 1;
    });
    announce_ahead();
  }

  /// Memory of so many bytes for an operation.
  [[nodiscard]] std::byte* scratch(gloo_slot& slot, std::size_t bytes) {
    guarded([&] { slot.scratch.resize(bytes); });
    return slot.scratch.data();
  }

  /// Announces memory for what rank `from` sends in phase `phase` (1 to 3), and the signal behind it.
  void announce_bulk(gloo_slot& slot, int phase, int from, std::span<std::byte> to) {
    guarded([&] {
      auto* const buffer = add_bulk(slot, to);
      receive_from(*buffer, from, slot_tag(slot, phase), 0, to.size());
      slot.bulk_receives.push_back({buffer, from, gloo_transfer::kind::receive});
    });
    announce_signal(slot, phase, from);
  }
  /// Announces a signal of phase `phase` (1 to 3) from rank `from`. Signals arrive in the order in which they are sent.
  void announce_signal(gloo_slot& slot, int phase, int from) {
    guarded([&] { receive_from(*slot.peers[index(from)], from, signal_tag(slot, phase), 0, 0); });
  }

  // The rest is for the steps of an operation.

  /// Sends data to rank `to`, and the signal behind them.
  void send_bulk(gloo_slot& slot, int phase, int to, std::span<std::byte const> from) {
    auto* const data = const_cast<std::byte*>(from.data()); // Gloo's buffers serve both directions; this one is read
    auto* const buffer = add_bulk(slot, {data, from.size()});
    send_to(slot, *buffer, to, phase, from.size());
    slot.bulk_sends.push_back({buffer, to, gloo_transfer::kind::send});
    send_signal(slot, phase, to);
  }
  void send_signal(gloo_slot& slot, int phase, int to) { send_own(slot, to, signal_bits | phase, 0); }

  /// Has the next step wait for the next signal from rank `from`.
  void await(gloo_slot& slot, int from) {
    slot.pending.push_back({slot.peers[index(from)].get(), from, gloo_transfer::kind::receive});
  }
  /// Collects the first `count` receives of bulk data, whose signals are here.
  void collect_receives(gloo_slot& slot, std::size_t count) { collect(slot, slot.bulk_receives, count); }
  /// Collects the first `count` sends of bulk data, whose receivers have answered.
  void collect_sends(gloo_slot& slot, std::size_t count) { collect(slot, slot.bulk_sends, count); }

  /// Has the channel's thread drive the operation, or, where there can be none, this one.
  void drive_in_background(gloo_slot& slot) {
    if (slot.queued || slot.done) return;
    try {
      driver_.add(slot);
    } catch (std::exception const&) {
      drive(slot);
    }
  }

  /// Returns whether the operation has completed; rethrows what failed.
  bool test(gloo_slot& slot) {
    drive_in_background(slot);
    if (!slot.done) return false;
    if (slot.error) std::rethrow_exception(slot.error);
    return true;
  }

  /// Returns when the operation has completed; rethrows what failed.
  void wait(gloo_slot& slot) {
    if (slot.queued)
      driver_.wait(slot);
    else if (!slot.done)
      drive(slot);
    if (slot.error) std::rethrow_exception(slot.error);
  }

  /// Gives the slot of a completed operation back.
  void close(std::unique_ptr<gloo_slot> slot) {
    if (failure_.has_happened()) return;
    // A peer's packets come in the order of collectives, so those of earlier ones, which may be open still, are here, too.
    closed_below_ = std::max(closed_below_, slot->sequence + 1);
    auto received = slot->sequence;
    for_each_peer([&](int r) { received = std::min(received, header_of(*slot, r).all_received_below); });
    received_below_ = std::max(received_below_, received);
    // A layer exchanges the same memory in every step. After an error receives may be pending in the buffers.
    try {
      if (!slot->error) idle_.keep(slot->bulk);
    } catch (std::bad_alloc const&) { // others are made
    }
    slot->error = nullptr;
    slot->pending.clear();
    slot->bulk_receives.clear();
    slot->bulk_sends.clear();
    slot->bulk.clear();
    free_.push_back(std::move(slot));
  }

  /// Makes the channel unusable, closes the connections so that every peer fails too, and wakes who waits here.
  void fail(std::string const& reason) {
    if (!failure_.happen(reason) || !connected_) return;
    try {
      // A wait that times out is Gloo's own way of failing every pending transfer of a context.
      std::byte none{};
      context_->createUnboundBuffer(&none, 0)->waitRecv(std::chrono::milliseconds{0});
    } catch (std::exception const&) { // as intended
    }
  }

private:
  static constexpr std::size_t announced_ahead = 4;
  static constexpr int signal_bits = 4; // of the phase in a tag

  [[nodiscard]] static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  [[nodiscard]] std::size_t stride() const noexcept { return size() <= 16 ? 32768 : size() <= 128 ? 4096 : 1024; }
  [[nodiscard]] std::byte* packet(gloo_slot const& slot, int rank) const {
    return slot.memory.get() + stride() * index(rank);
  }
  // Gloo's collectives use the prefixes 1 to 8 of the 64 bits, and point-to-point users small numbers.
  [[nodiscard]] std::uint64_t slot_tag(gloo_slot const& slot, int phase) const {
    return std::uint64_t{0x5e} << 56 | std::uint64_t{tag_ & 0xff'ffff} << 32 |
           std::uint64_t{slot.sequence & 0x1fff'ffff} << 3 | static_cast<std::uint64_t>(phase);
  }
  [[nodiscard]] std::uint64_t signal_tag(gloo_slot const& slot, int phase) const {
    return slot_tag(slot, signal_bits | phase);
  }

  void send_own(gloo_slot& slot, int to, int phase, std::size_t bytes) {
    send_to(slot, *slot.own, to, phase, bytes);
    ++slot.unconfirmed;
  }
  void send_to(gloo_slot const& slot, gloo_buffer& buffer, int to, int phase, std::size_t bytes) {
    try {
      buffer.send(to, slot_tag(slot, phase), 0, bytes);
    } catch (std::bad_alloc const&) { // this rank's own
      throw;
    } catch (std::exception const& failure) {
      lose(header_of(slot, rank()).called, std::to_string(to), failure);
    }
  }
  /// For the collective that is being started.
  void receive_from(gloo_buffer& buffer, int from, std::uint64_t tag, std::size_t offset, std::size_t bytes) {
    try {
      buffer.recv(from, tag, offset, bytes);
    } catch (std::bad_alloc const&) {
      throw;
    } catch (std::exception const& failure) {
      lose(opened_, std::to_string(from), failure);
    }
  }
  static void confirm_sends(gloo_slot& slot, std::chrono::milliseconds timeout) {
    for (; slot.unconfirmed > 0; --slot.unconfirmed) slot.own->waitSend(timeout);
  }

  void collect(gloo_slot const& slot, std::vector<gloo_transfer>& transfers, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) wait_for(slot, transfers[i]);
    transfers.erase(transfers.begin(), transfers.begin() + static_cast<std::ptrdiff_t>(count));
  }

  /// Goes on where it has failed before: what was announced cannot be taken back.
  void announce() {
    if (!next_) {
      next_ = reusable_slot();
      if (!next_) next_ = make_slot();
      next_->sequence = next_sequence_;
      next_peer_ = 1;
    }
    for (; next_peer_ < size(); ++next_peer_) {
      int const from = (rank() + next_peer_) % size();
      std::memset(packet(*next_, from), -1, sizeof(collective_header)); // of no collective
      receive_from(*next_->packets, from, slot_tag(*next_, 0), stride() * index(from), stride());
    }
    announced_.push_back(std::move(next_));
    ++next_sequence_;
  }

  /// A peer may have left after the collective that is under way, its last. That fails the next one, not this one.
  void announce_ahead() {
    try {
      while (announced_.size() < announced_ahead) announce();
    } catch (std::exception const&) { // the next collective meets it again
    }
  }

  std::unique_ptr<gloo_slot> reusable_slot() {
    // What its peers have received has been sent, so that waiting for it takes no time.
    auto const found = std::ranges::find_if(free_, [&](auto const& slot) { return slot->sequence < received_below_; });
    if (found == free_.end()) return nullptr;
    auto slot = std::move(*found);
    free_.erase(found);
    confirm_sends(*slot, timeout_);
    return slot;
  }

  std::unique_ptr<gloo_slot> make_slot() {
    free_.reserve(slots_ + 1); // lest `close` fails
    auto slot = std::make_unique<gloo_slot>();
    slot->reserve(index(size()));
    slot->memory = std::make_unique_for_overwrite<std::byte[]>(stride() * index(size()));
    slot->own = context_->createUnboundBuffer(packet(*slot, rank()), stride());
    slot->packets = context_->createUnboundBuffer(slot->memory.get(), stride() * index(size()));
    slot->peers.resize(index(size()));
    for_each_peer([&](int r) { slot->peers[index(r)] = context_->createUnboundBuffer(packet(*slot, r), stride()); });
    ++slots_;
    return slot;
  }

  gloo_buffer* add_bulk(gloo_slot& slot, std::span<std::byte> memory) {
    auto buffer = idle_.take(memory);
    if (!buffer) buffer = context_->createUnboundBuffer(memory.data(), memory.size());
    slot.bulk.push_back(std::move(buffer));
    return slot.bulk.back().get();
  }

  void require_usable() {
    if (failure_.has_happened()) throw gloo_error{failure_.text()};
  }

  /// Waits for the transfers of the operation and resumes it, until it is complete or has failed.
  void drive(gloo_slot& slot) {
    try {
      guarded([&] {
        do {
          for (; slot.missing_packets > 0; --slot.missing_packets) wait_for_packet(slot);
          for (auto const& transfer : slot.pending) wait_for(slot, transfer);
          slot.pending.clear();
        } while (!slot.resume(*this, slot));
      });
    } catch (...) {
      slot.error = std::current_exception();
    }
    slot.done = true;
  }

  [[nodiscard]] static std::chrono::milliseconds left(gloo_slot const& slot) {
    return std::max(std::chrono::ceil<std::chrono::milliseconds>(slot.deadline - clock::now()),
                    std::chrono::milliseconds{0});
  }

  void wait_for_packet(gloo_slot const& slot) {
    try {
      slot.packets->waitRecv(left(slot));
    } catch (std::exception const& failure) {
      bool const late = clock::now() >= slot.deadline && !failure_.has_happened();
      std::string missing, lost;
      for_each_peer([&](int r) {
        if (header_of(slot, r).called.sequence == slot.sequence) return;
        add_rank(missing, r);
        if (!late && !is_connected(slot, r)) add_rank(lost, r);
      });
      if (late) time_out(slot, missing);
      lose(header_of(slot, rank()).called, lost.empty() ? missing : lost, failure);
    }
  }

  static void add_rank(std::string& list, int rank) { list += (list.empty() ? "" : ", ") + std::to_string(rank); }

  [[nodiscard]] bool is_connected(gloo_slot const& slot, int peer) const {
    try {
      slot.peers[index(peer)]->recv(peer, signal_tag(slot, 0), 0, 0); // which nobody sends
      return true;
    } catch (std::exception const&) {
      return false;
    }
  }

  void wait_for(gloo_slot const& slot, gloo_transfer const& transfer) {
    try {
      transfer.wait(left(slot));
    } catch (std::exception const& failure) {
      if (clock::now() >= slot.deadline && !failure_.has_happened()) time_out(slot, still_missing(slot, transfer));
      lose(header_of(slot, rank()).called, std::to_string(transfer.peer), failure);
    }
  }

  /// `late`, and what has not arrived of the transfers behind it.
  [[nodiscard]] static std::string still_missing(gloo_slot const& slot, gloo_transfer const& late) {
    std::string missing = std::to_string(late.peer);
    for (bool behind = false; auto const& other : slot.pending) {
      try {
        if (behind) other.wait(std::chrono::milliseconds{0}); // nothing arrives any more; this tells what has
      } catch (std::exception const&) {
        add_rank(missing, other.peer);
      }
      behind = behind || &other == &late;
    }
    return missing;
  }

  [[noreturn]] void lose(signature const& called, std::string const& peers, std::exception const& failure) {
    require_usable(); // another thread may have aborted
    throw gloo_error{"rank " + std::to_string(rank()) + " lost its connection to rank " + peers + " in " +
                     describe(called) + "; that rank ended, or gave up because of another (" + failure.what() + ")"};
  }

  [[noreturn]] void time_out(gloo_slot const& slot, std::string const& missing) {
    throw timeout_error{"gloo", "rank " + std::to_string(rank()) + " waited " + std::to_string(timeout_.count()) +
                                    " ms in " + describe(header_of(slot, rank()).called) + " for rank " + missing};
  }

  /// Runs `f`, making gloo_error of what Gloo throws, after which the channel cannot be used.
  template <class F>
  void guarded(F f) {
    std::string reason;
    try {
      return f();
    } catch (communicator_error const& failure) {
      fail(failure.message());
      throw;
    } catch (error const&) {
      throw; // the ranks disagree, and know it
    } catch (std::exception const& failure) {
      reason = "rank " + std::to_string(rank()) + ": " + failure.what();
    }
    require_usable();
    fail(reason);
    throw gloo_error{reason};
  }

  std::shared_ptr<gloo::Context> context_;
  std::chrono::milliseconds timeout_;
  std::uint32_t tag_;
  bool connected_ = false;
  std::uint32_t next_sequence_ = 0;
  std::unique_ptr<gloo_slot> next_;  // which is being announced
  int next_peer_ = 1;                // the next to announce it to, so many ranks after this one
  std::uint32_t closed_below_ = 0;   // this rank has all packets of the collectives before this one
  std::uint32_t received_below_ = 0; // every peer has
  signature opened_;                 // the latest collective
  // Vectors, since a deque allocates now and then as things pass through it.
  std::vector<std::unique_ptr<gloo_slot>> announced_, free_;
  std::size_t slots_ = 0;
  idle_gloo_buffers idle_; // of bulk data that were exchanged lately

  lasting_failure failure_;

  gloo_driver driver_{[this](gloo_slot& slot) { drive(slot); }};
};

} // namespace syncnorm::detail
