#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/erased_work.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/ops/detail/digest.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/fold_ranks.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::detail {

/// The exchange of the values of one or several layers in one message, by gathering or by reducing, in two phases.
///
/// `start` issues every collective of the exchange, and `finish` none: an exchange may be abandoned between the two, and
/// exchanges may be finished in any order, without ranks getting out of step. An `error` of `start` is thrown by `finish`;
/// what else it meets, as a want of memory, the other ranks may not know of, so that this rank is not to go on as they do.
///
/// It may be moved, but not copied, between `start` and the end of its work. As in `channel_exchange`, the first exchange of a shape is
/// preceded by a head of fixed size, by which ranks come to agree on the size of what follows; one that fits into the head
/// is done with it. Under the reduce policy ranks that turn out to disagree, or to have a fault, then gather their headers
/// to say who and what.
class packet_exchange {
public:
  /// `values` numbers for each channel of each layer. `agreed`: an earlier exchange has shown that all ranks have these.
  packet_exchange(kept_vector<std::int64_t> channels, std::size_t values, bool agreed = false)
      : channels_{std::move(channels)}, values_{values}, agreed_{agreed} {}

  [[nodiscard]] kept_vector<std::int64_t> const& channels() const noexcept { return channels_; }
  [[nodiscard]] bool agreed() const noexcept { return agreed_; }
  void agree() noexcept { agreed_ = true; }

  /// Makes room for an exchange among `ranks` ranks, in which `header` and `own` are written next.
  void prepare(int ranks) {
    ranks_ = static_cast<std::size_t>(ranks);
    if (offsets_.empty()) {
      offsets_.reserve(1 + channels_.size()); // for want of memory there are none of them rather than some
      offsets_.push_back(0);
      for (auto const each : channels_) offsets_.push_back(offsets_.back() + header_room + values_ * extent(each));
    }
    own_.assign(offsets_.back(), 0.0);
    headers_.assign(channels_.size(), {});
    summaries_.assign(channels_.size(), {});
    of_ranks_.resize(ranks_);
    failure_ = nullptr;
    gathered_ = reduced_ = false;
  }

  [[nodiscard]] packet_header& header(std::size_t layer) { return headers_[layer]; }
  /// `[channels]` values `row` of this rank.
  [[nodiscard]] std::span<double> own(std::size_t layer, std::size_t row) {
    return row_of(std::span{own_}, layer, row);
  }

  /// Starts the exchange; `policy` is resolved. Null: it is complete. `two_phase`: returns when the last collective
  /// has been started, where the communicator can do that. Collective.
  template <communicator C>
  [[nodiscard]] std::unique_ptr<erased_work> start(C const& comm, merge_rule rule, exchange_policy policy,
                                                   bool two_phase) {
    rule_ = rule;
    auto const shape = shape_digest(channels_);
    for (std::size_t l = 0; l < headers_.size(); ++l) {
      headers_[l].policy = static_cast<std::int16_t>(policy);
      headers_[l].layers = static_cast<std::int16_t>(headers_.size());
      headers_[l].shape = shape;
      std::memcpy(own_.data() + offsets_[l], &headers_[l], sizeof(packet_header));
    }
    try {
      if (ranks_ == 1) {
        received_ = own_;
        gathered_ = true;
        return nullptr;
      }
      rank_ = syncnorm::rank(comm);
      if (!agreed_ && exchange_head(comm, policy)) return nullptr;
      if constexpr (allreduces<C, double>)
        if (policy == exchange_policy::reduce) return start_reduce(comm, two_phase);
      return start_gather(comm, two_phase);
    } catch (error const&) {
      failure_ = std::current_exception();
      return nullptr;
    }
  }

  /// Makes the summaries and the totals, once the work has completed. Throws what `start` met; and, the same on every rank,
  /// where ranks disagree or have a fault.
  void finish() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (!gathered_) return;
    require_own_message(rank_, std::as_bytes(std::span{own_}), std::as_bytes(std::span{received_}));
    for (std::size_t l = 0; l < channels_.size(); ++l) {
      for (std::size_t r = 0; r < ranks_; ++r) of_ranks_[r] = header_at(rank_values(r).data() + offsets_[l]);
      require_agreement(of_ranks_, layer_name(l));
      summaries_[l] = summarize(of_ranks_);
    }
    agreed_ = true;
  }

  [[nodiscard]] exchange_summary const& summary(std::size_t layer) const { return summaries_[layer]; }

  /// The values of all ranks together; under `merge_rule::moments` rows 0 and 1 are mean and m2. In rank order where they
  /// were gathered, so that every rank gets the same bits, as it does from an allreduce by the communicator's contract.
  void total(std::size_t layer, std::span<std::span<double> const> rows) const {
    if (reduced_) {
      for (std::size_t v = 0; v < rows.size(); ++v) {
        bool const is_m2 = rule_ == merge_rule::moments && v == 1;
        auto const from =
            is_m2 ? std::span{m2_}.subspan(channels_before(layer)) : std::span{sums_}.subspan(sum_at(layer, v));
        std::ranges::copy(from.first(rows[v].size()), rows[v].begin());
      }
      return;
    }
    for (auto const& row : rows) std::ranges::fill(row, 0.0);
    fold_ranks(
        rule_, ranks_, [&](std::size_t r) { return header_at(rank_values(r).data() + offsets_[layer]).count; },
        [&](std::size_t r, std::size_t v) { return row_of(rank_values(r), layer, v); }, rows);
  }

private:
  static constexpr std::size_t header_room = sizeof(packet_header) / sizeof(double);

  [[nodiscard]] static std::size_t extent(std::int64_t channels) {
    return static_cast<std::size_t>(std::max<std::int64_t>(channels, 0));
  }
  [[nodiscard]] std::string layer_name(std::size_t layer) const {
    return channels_.size() == 1 ? std::string{} : " of layer " + std::to_string(layer);
  }
  template <class D>
  [[nodiscard]] std::span<D> row_of(std::span<D> values, std::size_t layer, std::size_t row) const {
    auto const length = extent(channels_[layer]);
    return values.subspan(offsets_[layer] + header_room + row * length, length);
  }
  [[nodiscard]] static packet_header header_at(double const* from) {
    packet_header header;
    std::memcpy(&header, reinterpret_cast<std::byte const*>(from), sizeof header);
    return header;
  }
  [[nodiscard]] std::span<double const> rank_values(std::size_t rank) const {
    return std::span{received_}.subspan(rank * own_.size(), own_.size());
  }

  [[nodiscard]] std::size_t channels_before(std::size_t layer) const {
    return (offsets_[layer] - layer * header_room) / values_;
  }
  /// Where the sums of a row begin, which travel without the headers; of the moments there is one row, of means.
  [[nodiscard]] std::size_t sum_at(std::size_t layer, std::size_t row) const {
    auto const before = channels_before(layer) * (rule_ == merge_rule::moments ? 1 : values_);
    return prefix() + before + row * extent(channels_[layer]);
  }
  /// Numbers by which the ranks agree, before the sums: of `summed_agreement`, and of each layer its count and how many
  /// ranks need a backward pass, or cannot join one.
  [[nodiscard]] std::size_t prefix() const { return summed_agreement::size + 3 * channels_.size(); }

  /// Exchanges heads. Returns whether that was all. Throws where the heads disagree.
  template <class C>
  bool exchange_head(C const& comm, exchange_policy policy) {
    constexpr std::size_t room = header_room + 2 * static_cast<std::size_t>(head_channels);
    // The header of a single layer is that of all.
    std::size_t const at = channels_.size() == 1 ? 0 : header_room;
    bool const fits = at + own_.size() <= room;
    std::vector<double> head(room), heads(room * ranks_);
    received_.reserve(own_.size() * ranks_); // before the exchange, after which ranks go on alike
    packet_header all = headers_.front();
    // Of other faults, the layers' own headers tell; by this one the ranks would seem to disagree.
    auto const negative = std::ranges::find_if(channels_, [](std::int64_t of_layer) { return of_layer < 0; });
    auto const layer = static_cast<std::size_t>(negative - channels_.begin());
    if (channels_.size() > 1)
      set_text(all.fault, layer == channels_.size()
                              ? std::string{}
                              : "layer " + std::to_string(layer) + ": " + get_text(headers_[layer].fault));
    all.channels = std::accumulate(channels_.begin(), channels_.end(), std::int64_t{0});
    std::copy_n(own_.begin(), std::min(own_.size(), room - at), head.data() + at);
    std::memcpy(head.data(), &all, sizeof all);
    syncnorm::allgather(comm, std::as_bytes(std::span{head}), std::as_writable_bytes(std::span{heads}));
    require_own_message(rank_, std::as_bytes(std::span{head}), std::as_bytes(std::span{heads}));
    for (std::size_t r = 0; r < ranks_; ++r) of_ranks_[r] = header_at(heads.data() + r * room);
    require_agreement(of_ranks_);
    agreed_ = true;
    if (policy == exchange_policy::reduce || !fits) return false;
    received_.resize(own_.size() * ranks_);
    for (std::size_t r = 0; r < ranks_; ++r)
      std::copy_n(heads.data() + r * room + at, own_.size(), received_.data() + r * own_.size());
    gathered_ = true;
    return true;
  }

  template <class C>
  std::unique_ptr<erased_work> start_gather(C const& comm, bool two_phase) {
    received_.resize(own_.size() * ranks_);
    gathered_ = true;
    auto const in = std::as_bytes(std::span{own_});
    auto const out = std::as_writable_bytes(std::span{received_});
    if constexpr (allgathers_async<C, std::byte>)
      if (two_phase) return erase_work(syncnorm::allgather_async(comm, in, out));
    syncnorm::allgather(comm, in, out);
    return nullptr;
  }

  template <class C>
  std::unique_ptr<erased_work> start_reduce(C const& comm, bool two_phase) {
    received_.clear();
    received_.shrink_to_fit();
    if (rule_ == merge_rule::moments) m2_.resize(channels_before(channels_.size()));
    sums_.assign(prefix() + channels_before(channels_.size()) * (rule_ == merge_rule::moments ? 1 : values_), 0.0);
    summed_agreement::write(headers_, own_agreement_);
    std::ranges::copy(own_agreement_, sums_.begin());
    for (std::size_t l = 0; l < channels_.size(); ++l) {
      auto* const of_layer = sums_.data() + summed_agreement::size + 3 * l;
      of_layer[0] = static_cast<double>(headers_[l].count);
      of_layer[1] = headers_[l].backward == static_cast<std::int32_t>(backward_pass::needed) ? 1 : 0;
      of_layer[2] = headers_[l].backward == static_cast<std::int32_t>(backward_pass::impossible) ? 1 : 0;
    }
    return rule_ == merge_rule::moments ? reduce_moments(comm, two_phase) : reduce_sums(comm, two_phase);
  }

  /// First the counts and Σ n·mean, then m2 about the mean of all ranks, which loses nothing however far the mean is from 0.
  template <class C>
  std::unique_ptr<erased_work> reduce_moments(C const& comm, bool two_phase) {
    for (std::size_t l = 0; l < channels_.size(); ++l) {
      auto const mean = own(l, 0);
      for (std::size_t c = 0; c < mean.size(); ++c)
        sums_[sum_at(l, 0) + c] = static_cast<double>(headers_[l].count) * mean[c];
    }
    syncnorm::allreduce(comm, std::span<double const>{sums_}, std::span{sums_});
    accept_sums(comm, sums_);
    for (std::size_t l = 0; l < channels_.size(); ++l) {
      auto const mean = own(l, 0), own_m2 = own(l, 1), of_all = std::span{sums_}.subspan(sum_at(l, 0), mean.size());
      auto const m2 = std::span{m2_}.subspan(channels_before(l), mean.size());
      for (std::size_t c = 0; c < mean.size(); ++c) {
        of_all[c] = summaries_[l].count > 0 ? of_all[c] / static_cast<double>(summaries_[l].count) : 0;
        m2[c] = m2_about<double>({headers_[l].count, mean[c], own_m2[c]}, of_all[c], static_cast<int>(ranks_));
      }
    }
    reduced_ = true;
    return reduce(comm, std::span{m2_}, two_phase);
  }

  template <class C>
  std::unique_ptr<erased_work> reduce_sums(C const& comm, bool two_phase) {
    for (std::size_t l = 0; l < channels_.size(); ++l)
      for (std::size_t v = 0; v < values_; ++v)
        std::ranges::copy(own(l, v), sums_.begin() + static_cast<std::ptrdiff_t>(sum_at(l, v)));
    auto const agreement = std::span{sums_}.first(prefix());
    reduced_ = true;
    if (!two_phase) {
      syncnorm::allreduce(comm, std::span<double const>{sums_}, std::span{sums_});
      accept_sums(comm, agreement);
      return nullptr;
    }
    // What ranks do where they disagree is collective, so it has to come to light before the call returns.
    syncnorm::allreduce(comm, std::span<double const>{agreement}, agreement);
    accept_sums(comm, agreement);
    return reduce(comm, std::span{sums_}.subspan(prefix()), two_phase);
  }

  template <class C>
  static std::unique_ptr<erased_work> reduce(C const& comm, std::span<double> values, bool two_phase) {
    if constexpr (allreduces_async<C, double>)
      if (two_phase) return erase_work(syncnorm::allreduce_async(comm, std::span<double const>{values}, values));
    syncnorm::allreduce(comm, std::span<double const>{values}, values);
    return nullptr;
  }

  /// Takes in the sums by which ranks agree. Where they do not, gathers the headers, and throws.
  template <class C>
  void accept_sums(C const& comm, std::span<double const> sums) {
    bool agree =
        summed_agreement::holds(sums.first<summed_agreement::size>(), own_agreement_, static_cast<int>(ranks_));
    for (std::size_t l = 0; l < channels_.size(); ++l) {
      auto const of_layer = sums.subspan(summed_agreement::size + 3 * l, 3);
      summaries_[l] = {static_cast<std::int64_t>(of_layer[0]), of_layer[1] > 0};
      agree = agree && (of_layer[1] == 0 || of_layer[2] == 0);
    }
    if (agree) return;
    std::vector<packet_header> all(headers_.size() * ranks_), of_ranks(ranks_);
    syncnorm::allgather(comm, std::as_bytes(std::span{headers_}), std::as_writable_bytes(std::span{all}));
    for (std::size_t l = 0; l < headers_.size(); ++l) {
      for (std::size_t r = 0; r < ranks_; ++r) of_ranks[r] = all[r * headers_.size() + l];
      require_agreement(of_ranks, layer_name(l));
    }
    throw communicator_error{"exchange", "the allreduce gave a wrong sum: no rank reports a fault, and all agree"};
  }

  kept_vector<std::int64_t> channels_;
  std::size_t values_, ranks_ = 0;
  int rank_ = 0;
  bool agreed_;
  merge_rule rule_ = merge_rule::moments;
  bool gathered_ = false, reduced_ = false;
  std::vector<std::size_t> offsets_; // where each layer's header begins in what a rank sends
  std::array<double, summed_agreement::size> own_agreement_{};
  std::vector<double> own_, received_, sums_, m2_;
  std::vector<packet_header> headers_, of_ranks_;
  std::vector<exchange_summary> summaries_;
  std::exception_ptr failure_;
};

} // namespace syncnorm::detail
