#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/double_backward_buffers.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/packet.hpp>
#include <syncnorm/ops/detail/packet_exchange.hpp>

namespace syncnorm::detail {

/// The steps of a double backward pass over channels, of which ranks add sums up, and their order.
class double_backward_steps {
public:
  static constexpr std::string_view name = "batch_norm 2nd backward";

  double_backward_steps(double_backward_steps const&) = delete;
  double_backward_steps& operator=(double_backward_steps const&) = delete;
  virtual ~double_backward_steps() = default;

  template <communicator C>
  void run(C const& comm, bool exchange, batch_norm_workspace& workspace) {
    buffers_ = &workspace.double_buffers;
    buffers_->prepare(static_cast<std::size_t>(std::max<std::int64_t>(0, channels_)));
    if (syncnorm::size(comm) == 1 || saved_->scope != statistics_scope::all_ranks || !exchange) {
      throw_fault(name, check_);
      run_alone();
      return commit();
    }
    auto& packets = workspace.double_packets;
    if (workspace.exchange.agreed()) packets.agree();
    packets.prepare(syncnorm::size(comm));
    packets.header(0) = header();
    report_what_throws(packets.header(0), [&] {
      if (!check_.failed()) local();
    });
    for (std::size_t v = 0; v < buffers_type::rows; ++v)
      std::ranges::copy(own(static_cast<row>(v)), packets.own(0, v).begin());
    auto const rule = merge_rule::sums;
    auto const policy = resolve(saved_->exchange, comm, rule, channels_, buffers_type::rows);
    auto const work = packets.start(comm, rule, policy, false);
    explaining_mismatches([&] { packets.finish(); });
    std::array<std::span<double>, buffers_type::rows> totals;
    for (std::size_t v = 0; v < buffers_type::rows; ++v) totals[v] = all(static_cast<row>(v));
    packets.total(0, totals);
    apply();
    commit();
  }

protected:
  using buffers_type = double_backward_buffers;
  using row = buffers_type::row;

  /// Of so many channels that ranks exchange.
  double_backward_steps(std::int64_t channels, batch_norm_saved const& saved) : channels_{channels}, saved_{&saved} {}

  /// That of micro-batch k; where there are none, a default one.
  template <class View>
  [[nodiscard]] static View of(std::span<View const> views, std::size_t k) {
    return views.empty() ? View{} : views[k];
  }
  /// Says what is wrong with the number of channels, or of saved statistics, or of micro-batches of something other than x.
  void check_saved(std::int64_t per_channel) {
    check_.require(channels_ >= 0,
                   [&] { return check_.text("the number of channels is negative: ", channels_ / per_channel); });
    auto const length = static_cast<std::size_t>(std::max<std::int64_t>(0, channels_));
    check_.require(saved_->mean.size() == length && saved_->inv_std.size() == length, [&] {
      auto const per = static_cast<std::size_t>(per_channel);
      return check_.text("the saved statistics have ", saved_->mean.size() / per, " channels, expected ",
                         channels_ / per_channel, "; was there a forward pass?");
    });
  }
  void check_count(std::size_t count, std::size_t batches, char const* what, bool needed = false) {
    check_.require(count == batches || (count == 0 && !needed), [&] {
      return check_.text("there are ", count, " micro-batches of ", what, ", expected ", batches, " as of x");
    });
  }

  [[nodiscard]] std::span<double> own(row which) const { return buffers_type::of(buffers_->own, which); }
  [[nodiscard]] std::span<double> all(row which) const { return buffers_type::of(buffers_->all, which); }

  std::int64_t channels_;
  batch_norm_saved const* saved_;
  call_check check_;
  buffers_type* buffers_ = nullptr;

private:
  [[nodiscard]] virtual packet_header header() const = 0;
  /// Writes this rank's own sums.
  virtual void local() = 0;
  /// Makes the outputs by the sums of all ranks.
  virtual void apply() = 0;
  /// Both of this rank alone, whose sums are all.
  virtual void run_alone() = 0;
  /// Adds to gamma's gradient, when nothing throws any more.
  virtual void commit() = 0;
};

} // namespace syncnorm::detail
