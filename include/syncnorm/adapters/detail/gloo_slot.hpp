#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gloo/transport/unbound_buffer.h>

namespace syncnorm::detail {

class gloo_channel;
using gloo_buffer = gloo::transport::UnboundBuffer;

/// One completion that an operation waits for.
struct gloo_transfer {
  enum class kind : bool { send, receive };

  gloo_buffer* buffer;
  int peer;
  kind direction;

  void wait(std::chrono::milliseconds timeout) const {
    direction == kind::receive ? buffer->waitRecv(timeout) : buffer->waitSend(timeout);
  }
};

/// Buffers over memory that is not exchanged at the moment, the latest ones. For several threads.
class idle_gloo_buffers {
public:
  /// The one over `memory`, if there is one.
  [[nodiscard]] std::unique_ptr<gloo_buffer> take(std::span<std::byte const> memory) {
    std::lock_guard const lock{mutex_};
    auto const found = std::ranges::find_if(
        buffers_, [&](auto const& each) { return each->ptr == memory.data() && each->size == memory.size(); });
    if (found == buffers_.end()) return nullptr;
    auto buffer = std::move(*found);
    buffers_.erase(found);
    return buffer;
  }

  void keep(std::vector<std::unique_ptr<gloo_buffer>>& buffers) {
    std::lock_guard const lock{mutex_};
    for (auto& buffer : buffers) buffers_.push_back(std::move(buffer));
    if (buffers_.size() > most)
      buffers_.erase(buffers_.begin(), buffers_.end() - static_cast<std::ptrdiff_t>(most)); // the oldest
  }

private:
  static constexpr std::size_t most = 256;

  std::mutex mutex_;
  std::vector<std::unique_ptr<gloo_buffer>> buffers_;
};

/// The memory of one packet from every rank, and the operation that is using it. Slots are reused.
struct gloo_slot {
  /// What to do once everything in `pending` has completed. Returns whether the operation is complete; if not, it has
  /// put more into `pending`.
  using step = bool (*)(gloo_channel&, gloo_slot&);

  std::uint32_t sequence = 0;
  std::unique_ptr<std::byte[]> memory; // size packets; this rank's own is sent, the others are received
  std::unique_ptr<gloo_buffer> own;
  std::unique_ptr<gloo_buffer> packets; // those of all peers, so that a wait for one hears of what fails at any
  std::vector<std::unique_ptr<gloo_buffer>> peers; // for the signals of each; none at this rank
  int unconfirmed = 0;                             // sends of `own` whose completion has not been waited for

  std::chrono::steady_clock::time_point deadline;
  int missing_packets = 0; // which are waited for before what is in `pending`
  std::vector<gloo_transfer> pending;
  step resume = nullptr;
  bool queued = false;            // the channel's thread drives it
  std::atomic<bool> done = false; // whatever follows is its owner's again
  std::exception_ptr error;

  std::byte const* in = nullptr;
  std::byte* out = nullptr;
  std::vector<gloo_transfer> bulk_receives, bulk_sends;
  std::vector<std::byte> scratch;
  std::vector<std::unique_ptr<gloo_buffer>> bulk; // over memory of the user, or over scratch, which goes after them

  /// Room for what an operation of so many ranks notes, lest a slot that comes into use late allocates then.
  void reserve(std::size_t ranks) {
    for (auto* const transfers : {&pending, &bulk_receives, &bulk_sends}) transfers->reserve(ranks);
    bulk.reserve(2 * ranks);
  }
};

} // namespace syncnorm::detail
