#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/detail/exchange.hpp>
#include <syncnorm/ops/detail/packet.hpp>
#include <syncnorm/ops/detail/power_norm_packet.hpp>

namespace syncnorm::detail {

/// What an asynchronous allgather over `C` returns, if it can be asked for one.
template <class C>
struct gather_work {
  using type = completed_work;
};
template <allgathers_async<std::byte> C>
struct gather_work<C> {
  using type =
      decltype(allgather_async(std::declval<C const&>(), std::span<std::byte const>{}, std::span<std::byte>{}));
};

/// Sums one value per channel over the ranks, which say in a header what they are doing; between its start and its finish
/// the caller does something else.
///
/// As in channel_exchange, a message has to be of one size on all ranks, so that before they have agreed on the number of
/// channels it is a head of fixed size, and the rest follows; both then when it finishes.
template <class C>
class sum_exchange {
public:
  /// This rank's values, to be filled before `start`.
  [[nodiscard]] std::span<double> prepare(C const& comm, std::int64_t channels, bool agreed) {
    auto const legal = static_cast<std::size_t>(std::max<std::int64_t>(channels, 0));
    ranks_ = static_cast<std::size_t>(syncnorm::size(comm));
    agreed_ = agreed;
    first_ = agreed ? legal : std::min(legal, static_cast<std::size_t>(head_channels));
    message_ = header_size + (agreed ? legal : static_cast<std::size_t>(head_channels));
    // Room for both kinds of messages, so that a pass after the first allocates nothing.
    auto const most = header_size + std::max(legal, static_cast<std::size_t>(head_channels));
    send_.reserve(most);
    receive_.reserve(ranks_ * most);
    values_.assign(legal, 0.0);
    send_.assign(message_, 0.0);
    receive_.resize(ranks_ * message_);
    rest_.resize(ranks_ * (legal - first_));
    headers_.resize(ranks_);
    return values_;
  }

  /// Whether `start` only starts, rather than leaving everything to `finish`.
  [[nodiscard]] static constexpr bool can_overlap() { return allgathers_async<C, std::byte>; }

  void start(C const& comm, power_norm_header const& own) {
    received_ = false;
    std::memcpy(send_.data(), &own, sizeof own);
    std::ranges::copy(std::span{values_}.first(first_), send_.begin() + header_size);
    if (ranks_ == 1) {
      receive_ = send_;
      return;
    }
    if constexpr (can_overlap())
      if (agreed_) {
        work_.emplace(syncnorm::allgather_async(comm, bytes_of(std::as_const(send_)), bytes_of(receive_)));
        return;
      }
    late_ = true;
  }

  /// Waits for the exchange, and leaves in `sums` those over all ranks, in rank order, so that every rank gets the same
  /// bits. Throws on every rank where the headers report a fault or disagree.
  void finish(C const& comm, std::span<double> sums) {
    explaining_mismatches([&] {
      if (work_) {
        auto work = std::move(*work_);
        work_.reset();
        work.wait();
      }
      if (std::exchange(late_, false)) syncnorm::allgather(comm, bytes_of(std::as_const(send_)), bytes_of(receive_));
    });
    require_own_message(syncnorm::rank(comm), bytes_of(std::as_const(send_)), bytes_of(std::as_const(receive_)));
    for (std::size_t r = 0; r < ranks_; ++r)
      std::memcpy(&headers_[r], bytes_of(std::as_const(receive_)).data() + r * message_ * sizeof(double),
                  sizeof(power_norm_header));
    received_ = true;
    require_agreement(headers_);

    std::size_t const rest = values_.size() - first_;
    if (ranks_ == 1) {
      std::ranges::copy(values_, sums.begin());
      return;
    }
    if (rest > 0) {
      auto const last = bytes_of(std::span<double const>{values_}.subspan(first_));
      syncnorm::allgather(comm, last, bytes_of(rest_));
      require_own_message(syncnorm::rank(comm), last, bytes_of(std::as_const(rest_)));
    }
    std::ranges::fill(sums, 0.0);
    for (std::size_t r = 0; r < ranks_; ++r) {
      for (std::size_t c = 0; c < first_; ++c) sums[c] += receive_[r * message_ + header_size + c];
      for (std::size_t c = 0; c < rest; ++c) sums[first_ + c] += rest_[r * rest + c];
    }
  }

  /// Whose sum of channel `c` was no finite number, of several ranks; the number of ranks where there was none. Once finished.
  [[nodiscard]] std::size_t rank_not_finite(std::size_t c) const {
    std::size_t const rest = values_.size() - first_;
    std::size_t r = ranks_ == 1 ? 1 : 0;
    while (r < ranks_ &&
           std::isfinite(c < first_ ? receive_[r * message_ + header_size + c] : rest_[r * rest + c - first_]))
      ++r;
    return r;
  }

  /// Whether what was finished last, or failed, is known to be the same pass on every rank.
  [[nodiscard]] bool is_of_one_pass() const {
    return received_ && std::ranges::all_of(headers_, [&](auto const& of) { return of.pass == headers_.front().pass; });
  }

  /// The headers of all ranks, once finished.
  [[nodiscard]] std::span<power_norm_header const> headers() const { return headers_; }

private:
  static constexpr std::size_t header_size = sizeof(power_norm_header) / sizeof(double);
  static_assert(sizeof(power_norm_header) % sizeof(double) == 0);

  static std::span<std::byte const> bytes_of(std::span<double const> values) { return std::as_bytes(values); }
  static std::span<std::byte> bytes_of(std::vector<double>& values) {
    return std::as_writable_bytes(std::span{values});
  }

  std::size_t ranks_ = 0, first_ = 0, message_ = 0;
  bool agreed_ = false, late_ = false, received_ = false;
  std::vector<double> values_, send_, receive_, rest_; // doubles, for the alignment of the values
  std::vector<power_norm_header> headers_;
  // The last member, so that whoever destroys the exchange waits before the buffers go.
  std::optional<typename gather_work<C>::type> work_;
};

} // namespace syncnorm::detail
