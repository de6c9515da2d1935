#pragma once

#include <cstddef>
#include <exception>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/erased_work.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/packet.hpp>
#include <syncnorm/ops/detail/packet_exchange.hpp>

namespace syncnorm {

/// Passes whose exchange is under way. Whatever it borrows, the layers above all, has to stay where it is until then.
///
/// `begin` has started every collective, `finish` starts none: so any number of them may be pending over a communicator,
/// and each rank may finish them in an order of its own; but several forward passes of one layer, each of which moves its running
/// statistics, in the same as the others. No other forward pass of a layer may come between `begin` and `finish` of its backward pass,
/// which then throws, on the ranks where it did. Destruction without `finish`, by an exception for instance, waits
/// for the exchange and drops what came: the other ranks and the communicator do not notice, and on this rank nothing has
/// changed but that `saved` has no forward pass, so that a backward pass throws on every rank. So its running statistics stay
/// behind those of ranks that do finish the pass, until it gets theirs, which are the same on all of these. To drop a pass on all
/// ranks, or on none, keeps them equal.
class pending_passes {
public:
  pending_passes(pending_passes&& other) noexcept
      : exchange_{std::move(other.exchange_)}, home_{other.home_}, passes_{std::move(other.passes_)},
        failure_{std::move(other.failure_)}, done_{std::exchange(other.done_, true)},
        exchanges_{other.exchanges_}, work_{std::move(other.work_)} {}
  pending_passes& operator=(pending_passes&& other) noexcept {
    if (this == &other) return *this;
    drop();
    work_.reset(); // waits, before the buffers go
    exchange_ = std::move(other.exchange_);
    home_ = other.home_;
    passes_ = std::move(other.passes_);
    failure_ = std::move(other.failure_);
    done_ = std::exchange(other.done_, true);
    exchanges_ = other.exchanges_;
    work_ = std::move(other.work_);
    return *this;
  }
  ~pending_passes() { drop(); } // the work, declared last, waits

  /// Whether `finish` would not have to wait. Some communicators move data only while they are called; this does.
  [[nodiscard]] bool ready() {
    if (work_ == nullptr) return true;
    try {
      return work_->test();
    } catch (...) {
      failure_ = std::current_exception();
      work_.reset();
      return true;
    }
  }

  /// Waits for the exchange and completes the passes. Not collective. Throws what the passes throw, the same on every rank,
  /// and then leaves running statistics, gradients and counters of all layers as they were. Once.
  void finish() {
    if (done_) throw invalid_argument_error{"finish: these passes are finished already"};
    done_ = true;
    try {
      complete();
    } catch (...) {
      fail();
      throw;
    }
    if (home_->agreed()) exchange_.agree(); // by passes that were begun meanwhile
    *home_ = std::move(exchange_);
    passes_.clear(); // so that the next ones take their memory
  }

  /// Takes passes of one kind, forward or backward, and begins them over `comm`: one collective for all of them once `home`,
  /// which keeps the buffers, has been used for layers of these channels. Blocks where the communicator is not asynchronous; the
  /// first time for the ranks to agree on the channels; and under the reduce policy for the first of two allreduces. Errors
  /// come from `finish`; but a want of memory, and what a communicator of the user's throws that is no `error`, from here, on this rank
  /// alone.
  template <communicator C>
  [[nodiscard]] static pending_passes begin(C const& comm, std::span<batch_norm_pass> passes,
                                            detail::packet_exchange& home,
                                            detail::pass_form form = detail::pass_form::in_group) {
    auto pending = detail::or_fail(passes, [&] { return pending_passes{passes, home}; });
    try {
      pending.start(comm, form);
    } catch (...) {
      pending.drop();
      throw;
    }
    return pending;
  }

private:
  pending_passes(std::span<batch_norm_pass> passes, detail::packet_exchange& home)
      : exchange_{std::exchange(home, {home.channels(), 2, home.agreed()})}, home_{&home},
        passes_(std::make_move_iterator(passes.begin()), std::make_move_iterator(passes.end())) {}

  void fail() const {
    for_each_layer([](std::size_t, detail::pass_steps& steps) { steps.fail(); });
  }
  /// Fails unless finished.
  void drop() {
    if (!std::exchange(done_, true)) fail();
  }

  void complete() {
    detail::explaining_mismatches([&] {
      if (auto const work = std::move(work_)) work->wait();
      if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
      if (exchanges_) exchange_.finish();
    });
    for_each_layer([&](std::size_t l, detail::pass_steps& steps) {
      takes_part(steps) ? steps.accept(exchange_.summary(l)) : steps.require_valid();
    });
    auto const all_of = [](detail::pass_steps const& steps) { return detail::channel_span{0, steps.channels()}; };
    for_each_layer([&](std::size_t l, detail::pass_steps& steps) {
      if (!takes_part(steps)) return;
      exchange_.total(l, steps.totals(all_of(steps)));
      steps.apply(all_of(steps));
    });
    for_each_layer([&](std::size_t, detail::pass_steps& steps) {
      if (!takes_part(steps)) steps.run_alone();
    });
    // Nothing throws any more.
    for_each_layer([&](std::size_t l, detail::pass_steps& steps) {
      takes_part(steps) ? steps.commit(all_of(steps), exchange_.own(l, 0), exchange_.own(l, 1)) : steps.commit_alone();
    });
  }

  template <class F>
  void for_each_layer(F const& f) const {
    for (std::size_t l = 0; l < passes_.size(); ++l) f(l, passes_[l].steps());
  }
  [[nodiscard]] bool takes_part(detail::pass_steps const& steps) const { return exchanges_ && steps.collective(); }

  template <class C>
  void start(C const& comm, detail::pass_form form) {
    exchanges_ = false;
    for_each_layer([&](std::size_t, detail::pass_steps const& steps) { exchanges_ |= steps.collective(); });
    if (!exchanges_) return;
    auto const& first = passes_.front().steps();
    std::int64_t channels = 0;
    exchange_.prepare(syncnorm::size(comm));
    for_each_layer([&](std::size_t l, detail::pass_steps& steps) {
      channels += steps.channels();
      auto& header = exchange_.header(l) = steps.header();
      header.form = steps.collective() ? form : detail::pass_form::in_group_alone;
      detail::report_what_throws(header, [&] {
        if (steps.rule() != first.rule())
          throw invalid_argument_error{"a forward and a backward pass cannot travel together"};
        for (std::size_t before = 0; before < l; ++before)
          if (steps.saves_to() != nullptr && passes_[before].steps().saves_to() == steps.saves_to())
            throw invalid_argument_error{"two forward passes of one group are of the same layer"};
        if (steps.collective())
          steps.local({0, steps.channels()}, exchange_.own(l, 0), exchange_.own(l, 1));
        else
          header.count = 0;
      });
    });
    auto const policy =
        detail::resolve(detail::policy_asked(exchange_.header(0)), comm, first.rule(), channels, 2, passes_.size());
    work_ = exchange_.start(comm, first.rule(), policy, true);
    if (exchange_.agreed()) home_->agree();
  }

  detail::packet_exchange exchange_;
  detail::packet_exchange* home_;
  detail::kept_vector<batch_norm_pass> passes_; // taken when nothing throws any more
  std::exception_ptr failure_;
  bool done_ = false, exchanges_ = false;
  std::unique_ptr<detail::erased_work> work_; // last, so that it goes first, and waits while there are buffers
};

/// Begins one layer's pass over `comm`, with the buffers of the layer's workspace, which has to outlive it. Collective; see
/// `pending_passes`.
template <communicator C>
[[nodiscard]] pending_passes begin_pass(C const& comm, batch_norm_pass pass, batch_norm_workspace& workspace) {
  if (workspace.exchange.agreed()) workspace.packets.agree();
  auto pending = pending_passes::begin(comm, {&pass, 1}, workspace.packets, detail::pass_form::two_phases);
  if (workspace.packets.agreed()) workspace.exchange.agree();
  return pending;
}

} // namespace syncnorm
