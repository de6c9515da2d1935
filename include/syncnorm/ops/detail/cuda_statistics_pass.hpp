#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>

// What passes of real and of complex numbers have of the statistics that a forward pass saves.
namespace syncnorm::cuda::detail {

/// A forward pass, which saves statistics.
class saving_pass : public groupable_pass {
public:
  [[nodiscard]] std::string_view name() const override {
    return constant() ? "batch_norm inference" : "batch_norm forward";
  }
  [[nodiscard]] merge_rule rule() const override { return merge_rule::moments; }
  [[nodiscard]] bool collective() const override { return scope_ == statistics_scope::all_ranks; }
  [[nodiscard]] batch_norm_saved const* saves_to() const override { return saved_; }
  void forgo(cudaStream_t stream) override {
    static constexpr std::int64_t failed = -1;
    save();
    syncnorm::detail::require_cuda(
        cudaMemcpyAsync(saved_->statistics().count, &failed, sizeof failed, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  }
  void fail() noexcept override {
    ++saved_->passes;
    saved_->exists = false;
    saved_->scope = statistics_scope::constant; // so that no backward pass is collective: the others may have none
  }
  void drop() noexcept override {
    fail();
    saved_->scope = scope_;
  }

protected:
  saving_pass(statistics_scope scope, batch_norm_options const& options, batch_norm_saved& saved,
              batch_norm_workspace& workspace, batch_norm_caller const& caller)
      : groupable_pass{workspace, caller}, scope_{scope}, options_{options}, saved_{&saved} {}

  [[nodiscard]] bool constant() const { return scope_ == statistics_scope::constant; }
  /// Options, and what `running_statistics`, or those of complex channels, have in memory of the device.
  template <class Running>
  void check_running(Running const& running, std::int64_t channels) {
    if (constant())
      check_.eps(options_.eps);
    else
      check_.options(options_, running, channels);
    check_.values(running.mean, "running_mean", channels);
    check_.values(running.var, "running_var", channels);
    if (running.num_batches_tracked != nullptr) check_.memory(running.num_batches_tracked, "num_batches_tracked");
  }
  /// Of a pass without masks, by which the count is known.
  void check_count(bool alone, std::int64_t count) {
    if (alone && !constant())
      check_.require(count != 1, [&] { return syncnorm::detail::one_value_fault(collective()); });
  }
  void save() {
    ++saved_->passes;
    saved_->scope = scope_;
    saved_->exists = true;
    saved_->own_count = constant() || check_.failed() ? -1 : header_.count;
    saved_->exchange = options_.exchange;
    saved_->normalized_by = options_.normalize_by;
  }

  statistics_scope scope_;
  batch_norm_options options_;
  batch_norm_saved* saved_;
};

/// A `Pass` by what a forward pass has saved.
template <class Pass>
class by_saved : public Pass {
public:
  [[nodiscard]] bool collective() const override { return exchange_ && saved_->scope == statistics_scope::all_ranks; }

protected:
  by_saved(bool exchange, batch_norm_saved const& saved, batch_norm_workspace& workspace,
           batch_norm_caller const& caller)
      : Pass{workspace, caller}, exchange_{exchange}, saved_{&saved} {}

  void check_forward(cudaStream_t stream) {
    this->check_.place(stream);
    this->check_.require(saved_->exists, [] { return "there was no forward pass"; });
    this->check_.saved(*saved_, this->workspace_->channels());
  }

  bool exchange_;
  batch_norm_saved const* saved_;
};

/// A backward pass.
class following_pass : public by_saved<groupable_pass> {
public:
  [[nodiscard]] std::string_view name() const override { return "batch_norm backward"; }
  void require_current() const override {
    if (saved_->passes != saved_passes_)
      throw invalid_argument_error{"batch_norm backward: the layer has had another forward pass since this one began"};
  }

protected:
  following_pass(bool exchange, batch_norm_saved const& saved, batch_norm_workspace& workspace,
                 batch_norm_caller const& caller)
      : by_saved{exchange, saved, workspace, caller}, saved_passes_{saved.passes} {}

  std::int64_t saved_passes_; ///< when the pass was made
};

/// A double backward pass, which has packets of its own.
class second_order_pass : public by_saved<device_pass> {
public:
  [[nodiscard]] std::string_view name() const override { return "batch_norm 2nd backward"; }
  [[nodiscard]] pass_packets const& packets() const override { return workspace_->double_packets(); }
  void run_alone(cudaStream_t stream) override {
    packet_place const own{packets().own().data()};
    local(header(), own, stream);
    apply(own_packet(own), own, workspace_->report(), stream);
  }

protected:
  using by_saved::by_saved;

  /// As many micro-batches as of x.
  void check_batches(std::size_t batches, std::size_t dy, std::size_t u, std::size_t to_dy, std::size_t to_x) {
    check_.batches_of(dy, batches, "micro-batches of dy", false);
    check_.batches_of(u, batches, "micro-batches of the gradient with respect to dx", true);
    check_.batches_of(to_dy, batches, "micro-batches of the gradient to dy", true);
    check_.batches_of(to_x, batches, "micro-batches of the gradient to x", true);
  }
  /// Without room for its packet, not even a fault can be told the other ranks.
  void reserve(cudaStream_t stream) {
    if (!packets().empty()) return;
    if (is_capturing(stream))
      throw invalid_argument_error{std::string{name()} +
                                   ": the stream is being captured in a graph before there is memory "
                                   "for it: call reserve_double_backward() first"};
    workspace_->reserve_double_backward();
  }
};

} // namespace syncnorm::cuda::detail
