#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::detail {

/// Channels [first, first + length).
struct channel_span {
  std::int64_t first = 0, length = 0;
};

/// One message of an exchange: two values for each channel of a span, on this rank and, after the exchange, on all. Before them
/// comes a header in the first message, and in the others whether the rank has failed meanwhile.
struct exchange_part {
  channel_span channels;
  std::span<double> first, second; ///< this rank's values, `[length]` each
  std::span<std::byte> send, receive;
  std::size_t values_offset = 0; ///< where in a rank's message its values begin

  void tell(bool failed) const {
    double const flag = failed ? 1 : 0;
    std::memcpy(send.data(), &flag, sizeof flag);
  }
  [[nodiscard]] bool has_failed(std::size_t rank) const {
    double flag = 0;
    std::memcpy(&flag, receive.data() + rank * send.size(), sizeof flag);
    return flag != 0;
  }

  [[nodiscard]] double const* values_of(std::size_t rank) const {
    return reinterpret_cast<double const*>(receive.data() + rank * send.size() + values_offset);
  }
  [[nodiscard]] std::span<double const> first_of(std::size_t rank) const { return {values_of(rank), first.size()}; }
  [[nodiscard]] std::span<double const> second_of(std::size_t rank) const {
    return {values_of(rank) + first.size(), first.size()};
  }
};

/// How many channels a pass exchanges at a time. Every rank says in its header how many it would; the next exchange takes the most that
/// any said, so that all cut alike. Where none has a say, all go on as before.
struct exchange_plan {
  std::int64_t part_channels = std::numeric_limits<std::int64_t>::max();
};

/// What a rank throws between the messages of a pass, for which the others wait: it goes on exchanging, and tells them.
class midway_failure {
public:
  template <class F>
  void attempt(F const& f) {
    if (thrown_ != nullptr) return;
    try {
      f();
    } catch (...) {
      thrown_ = std::current_exception();
    }
  }
  [[nodiscard]] bool failed() const noexcept { return thrown_ != nullptr; }
  void rethrow() const {
    if (thrown_ != nullptr) std::rethrow_exception(thrown_);
  }

private:
  std::exception_ptr thrown_;
};

/// The buffers and the protocol by which ranks exchange a header and two values for each channel.
///
/// All messages have to be of equal size on every rank, although the number of channels is among the things that ranks
/// may disagree on. So the first exchange is a head of fixed size, the header and the first `head_channels` channels,
/// and the rest follows once the heads agree. From then on the size is agreed, and a plan says in how many messages.
class channel_exchange {
public:
  /// `agreed`: an earlier exchange has shown already that all ranks have this number of channels.
  explicit channel_exchange(std::int64_t channels, bool agreed = false) : channels_{channels}, agreed_{agreed} {}
  /// Copies know what the ranks have agreed on; buffers are not shared.
  channel_exchange(channel_exchange const& other) : channel_exchange{other.channels_, other.agreed_} {}
  channel_exchange(channel_exchange&&) noexcept = default;
  channel_exchange& operator=(channel_exchange const& other) { return *this = channel_exchange{other}; }
  channel_exchange& operator=(channel_exchange&&) noexcept = default;
  ~channel_exchange() = default;

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }
  /// Whether all ranks are known to have this number of channels.
  [[nodiscard]] bool agreed() const noexcept { return agreed_; }
  void agree() noexcept { agreed_ = true; }

  /// Exchanges `own` and the values that `local(part)` writes for each part. `accept()` is called once the headers of all
  /// ranks are known and agree, then `consume(part, next)` for each part in turn. Where the communicator is asynchronous and
  /// `ahead` says so, `local` of the next part runs while one is exchanged, and `next` is null; else consume does what
  /// `local(*next)` would, so that a part that is in the cache stays there. After the last part `next` is null.
  /// Throws on every rank where the headers report a fault or disagree, or one throws before the last part. Collective.
  template <allgathers<std::byte> C, class Local, class Accept, class Consume>
  void run(C const& comm, packet_header const& own, exchange_plan& plan, bool ahead, Local const& local,
           Accept const& accept_all, Consume const& consume) {
    prepare(syncnorm::size(comm), plan.part_channels);
    exchange_all(comm, own, plan, ahead, local, accept_all, consume);
    auto const parts = std::max<std::int64_t>(channels_, 1) / plan.part_channels + 1;
    parts_.reserve(static_cast<std::size_t>(parts)); // those of the next pass
  }

  /// The headers of all ranks, once part 0 has been exchanged.
  [[nodiscard]] std::span<packet_header const> headers() const { return headers_; }

  /// The parts of the last exchange.
  [[nodiscard]] std::span<exchange_part const> parts() const { return parts_; }

private:
  template <class C, class Local, class Accept, class Consume>
  void exchange_all(C const& comm, packet_header const& own, exchange_plan& plan, bool ahead, Local const& local,
                    Accept const& accept_all, Consume const& consume) {
    auto mine = own;
    report_what_throws(mine, [&] { local(parts_.front()); });
    std::memcpy(parts_.front().send.data(), &mine, sizeof mine);
    midway_failure failure;
    auto const receive = [&](std::size_t k) {
      require_own_message(syncnorm::rank(comm), parts_[k].send, parts_[k].receive);
      if (k != 0) return require_no_failure(parts_[k], failure);
      accept_headers();
      std::int64_t most = 0;
      for (auto const& header : headers_) most = std::max(most, header.part_channels);
      if (most > 0) plan.part_channels = most;
      failure.attempt(accept_all);
    };
    auto const last = parts_.size() - 1;
    if constexpr (allgathers_async<C, std::byte>) {
      if (last != 0) {
        run_async(comm, ahead, failure, local, receive, consume);
        return failure.rethrow();
      }
    }
    for (std::size_t k = 0; k <= last; ++k) {
      auto const& part = parts_[k];
      if (k != 0) part.tell(failure.failed());
      syncnorm::allgather(comm, std::span<std::byte const>{part.send}, part.receive);
      receive(k);
      failure.attempt([&] { consume(part, k < last ? &parts_[k + 1] : nullptr); });
    }
    failure.rethrow();
  }

  template <class C, class Local, class Receive, class Consume>
  void run_async(C const& comm, bool ahead, midway_failure& failure, Local const& local, Receive const& receive,
                 Consume const& consume) {
    auto const start = [&](std::size_t k) {
      auto const& part = parts_[k];
      if (k != 0) part.tell(failure.failed());
      return syncnorm::allgather_async(comm, std::span<std::byte const>{part.send}, part.receive);
    };
    std::optional in_flight{start(0)};
    for (std::size_t k = 0; k < parts_.size(); ++k) {
      bool const more = k + 1 < parts_.size();
      if (more && ahead) failure.attempt([&] { local(parts_[k + 1]); });
      in_flight->wait();
      receive(k);
      if (more && ahead) in_flight.emplace(start(k + 1));
      failure.attempt([&] { consume(parts_[k], more && !ahead ? &parts_[k + 1] : nullptr); });
      if (more && !ahead) in_flight.emplace(start(k + 1));
    }
  }

  /// Throws where a rank has failed before it sent `part`, on every rank.
  void require_no_failure(exchange_part const& part, midway_failure const& failure) const {
    for (std::size_t r = 0; r < headers_.size(); ++r) {
      if (!part.has_failed(r)) continue;
      failure.rethrow();
      throw invalid_argument_error{get_text(headers_[r].pass) + ": rank " + std::to_string(r) +
                                   " failed in the midst of the pass"};
    }
  }

  /// Lays the parts out for `ranks` ranks unless they lie so already.
  void prepare(int ranks, std::int64_t part_channels) {
    headers_.resize(static_cast<std::size_t>(ranks));
    std::int64_t const legal = std::max<std::int64_t>(channels_, 0);
    auto const first = std::min(legal, agreed_ ? part_channels : head_channels);
    auto const next = agreed_ ? first : legal - first;
    if (!parts_.empty() && ranks_ == ranks && laid_out_agreed_ == agreed_ && parts_.front().channels.length == first)
      return;
    ranks_ = ranks;
    laid_out_agreed_ = agreed_;
    lay_out(legal, first, next);
  }

  /// A part of `first` channels and then parts of `next`, of `channels` in all.
  void lay_out(std::int64_t channels, std::int64_t first, std::int64_t next) {
    parts_.clear(); // whatever is thrown here, there are all parts or none
    // An agreed message is exact; the head has room for head_channels whatever this rank's channels are.
    std::size_t const head_room = static_cast<std::size_t>(agreed_ ? first : head_channels);
    std::size_t const blocks = 1 + static_cast<std::size_t>(ranks_);
    // Room for any later layout, too, so that a pass after the first allocates nothing.
    auto const most = static_cast<std::size_t>(channels + head_channels);
    auto const rest = static_cast<std::size_t>(channels - first);
    auto const others = rest == 0 ? 0 : (rest - 1) / static_cast<std::size_t>(next) + 1; // parts after the first
    parts_.reserve(1 + others);
    storage_.reserve(blocks * (sizeof(packet_header) / sizeof(double) + 3 * most));
    storage_.assign(blocks * (sizeof(packet_header) / sizeof(double) + 2 * (head_room + rest) + others), 0.0);
    auto* free = reinterpret_cast<std::byte*>(storage_.data());
    for (channel_span span{0, first};;) {
      bool const head = parts_.empty();
      auto const length = static_cast<std::size_t>(span.length);
      exchange_part part;
      part.channels = span;
      part.values_offset = head ? sizeof(packet_header) : sizeof(double);
      std::size_t const bytes = part.values_offset + 2 * sizeof(double) * (head ? head_room : length);
      part.send = {free, bytes};
      part.receive = {free + bytes, bytes * static_cast<std::size_t>(ranks_)};
      auto* values = reinterpret_cast<double*>(free + part.values_offset);
      part.first = {values, length};
      part.second = {values + length, length};
      free += blocks * bytes;
      parts_.push_back(part);
      span.first += span.length;
      span.length = std::min(next, channels - span.first);
      if (span.length <= 0) break;
    }
  }

  void accept_headers() {
    auto const& part = parts_.front();
    for (std::size_t r = 0; r < headers_.size(); ++r)
      std::memcpy(&headers_[r], part.receive.data() + r * part.send.size(), sizeof(packet_header));
    require_agreement(headers_);
    agreed_ = true;
  }

  std::int64_t channels_;
  bool agreed_, laid_out_agreed_ = false;
  int ranks_ = 0;
  std::vector<double> storage_; // double, for the alignment of the values
  std::vector<exchange_part> parts_;
  std::vector<packet_header> headers_;
};

} // namespace syncnorm::detail
