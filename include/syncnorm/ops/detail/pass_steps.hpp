#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <span>
#include <string_view>

#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/ops/detail/exchange.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm {
struct batch_norm_saved;
}

namespace syncnorm::detail {

/// One layer's pass in the steps between which ranks exchange. However the exchange is done, the steps are these:
///
///     header, local        this rank's part of the exchange
///     accept               what is wrong on all ranks alike is thrown here; prepares `totals`
///     totals, apply        for disjoint spans of channels: where the values of all ranks go, and what is made of them
///     commit               for the same spans: changes what outlives the pass
class pass_steps {
public:
  virtual ~pass_steps() = default;

  [[nodiscard]] virtual merge_rule rule() const = 0;
  [[nodiscard]] virtual std::int64_t channels() const = 0;
  /// Whether the pass involves other ranks, where there are any.
  [[nodiscard]] virtual bool collective() const = 0;
  [[nodiscard]] virtual packet_header header() const = 0;
  virtual void local(channel_span part, std::span<double> first, std::span<double> second) = 0;
  virtual void accept(exchange_summary const& all) = 0;
  [[nodiscard]] virtual std::array<std::span<double>, 2> totals(channel_span part) = 0;
  virtual void apply(channel_span part) = 0;
  /// `apply` of a part and `local` of the part after it.
  virtual void apply_and_local(channel_span part, channel_span next, std::span<double> first,
                               std::span<double> second) {
    apply(part);
    local(next, first, second);
  }
  virtual void commit(channel_span part, std::span<double const> first, std::span<double const> second) = 0;
  /// What a forward pass leaves for its backward pass; of others null.
  [[nodiscard]] virtual batch_norm_saved const* saves_to() const { return nullptr; }
  /// Instead of `commit`, of a pass that throws: makes sure that nothing goes on from it.
  virtual void fail() {}
  /// Throws what is wrong on this rank.
  virtual void require_valid() const = 0;
  /// All of a valid pass on this rank alone but for `commit_alone`.
  virtual void run_alone() = 0;
  void commit_alone() {
    channel_span const all{0, channels()};
    auto const [first, second] = totals(all);
    commit(all, first, second);
  }
};

/// A forward pass of this rank alone, which has nothing to exchange.
class local_pass_steps : public pass_steps {
public:
  [[nodiscard]] merge_rule rule() const override { return merge_rule::moments; }
  [[nodiscard]] bool collective() const override { return false; }
  void local(channel_span, std::span<double>, std::span<double>) override {}
  void accept(exchange_summary const&) override {}
  [[nodiscard]] std::array<std::span<double>, 2> totals(channel_span) override { return {}; }
  void apply(channel_span) override {}
  void commit(channel_span, std::span<double const>, std::span<double const>) override {}
};

/// The K micro-batches of a pass, `name[k]` in messages, or plainly `name` where there is one.
class batch_name {
public:
  batch_name(std::string_view name, std::size_t k, std::size_t batches) : name_{name}, k_{k}, batches_{batches} {}

  friend std::ostream& operator<<(std::ostream& to, batch_name const& of) {
    to << of.name_;
    return of.batches_ == 1 ? to : to << '[' << of.k_ << ']';
  }

private:
  std::string_view name_;
  std::size_t k_, batches_;
};

} // namespace syncnorm::detail
