#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/ops/batch_norm_backward.hpp>
#include <syncnorm/ops/batch_norm_double_backward.hpp>
#include <syncnorm/ops/batch_norm_forward.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/shared_in_place.hpp>
#include <syncnorm/ops/pending_passes.hpp>

namespace syncnorm {

/// A batch normalization layer whose statistics span the ranks of `C`. It owns the parameters (`P`, gamma = 1, beta =
/// 0), their gradients, the running statistics (mean 0, var 1) and what its latest forward pass saved.
///
/// Construction is local and checks nothing: what is wrong with the options is reported by the first forward pass, on
/// every rank. Errors leave parameters, gradients, running statistics and the counter as they were.
template <mutable_element T, communicator C = self_communicator, host::executor E = host::serial_executor,
          mutable_element P = accumulate_t<T>>
requires allgathers<C, std::byte>
class batch_norm {
public:
  explicit batch_norm(C comm, std::int64_t channels, batch_norm_layer_options const& options = {}, E exec = {})
      : comm_{std::move(comm)}, exec_{std::move(exec)}, options_{options}, channels_{channels}, workspace_{channels} {
    auto const c = static_cast<std::size_t>(channels > 0 ? channels : 0);
    if (options.affine && options.parts != affine_parts::beta) {
      gamma_.assign(c, from_double<P>(1));
      gamma_grad_.assign(c, from_double<P>(0));
    }
    if (options.affine && options.parts != affine_parts::gamma) {
      beta_.assign(c, from_double<P>(0));
      beta_grad_.assign(c, from_double<P>(0));
    }
    if (options.track_running_stats) {
      running_mean_.assign(c, from_double<P>(0));
      running_var_.assign(c, from_double<P>(1));
    }
  }

  /// y = batch_norm(x). `[N, C, S]`, y may be x unless a backward pass follows, which needs x. In training mode
  /// collective and as `batch_norm_forward`; in evaluation mode, and while the statistics are frozen, local, by the
  /// running statistics. `epilogue` activates, adds a residual and masks.
  void forward(tensor_view<T const> x, tensor_view<T> y, batch_norm_epilogue<T> const& epilogue = {}) {
    forward(std::array<tensor_view<T const>, 1>{x}, std::array{y}, std::span{&epilogue, 1});
  }

  /// The same of K micro-batches by one statistic, with one exchange: as `batch_norm_forward_batches`.
  void forward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
               std::span<batch_norm_epilogue<T> const> epilogues = {}) {
    forward_by(x, y, epilogues, {});
  }

  /// dx for the latest forward pass, whose x this has to be; adds to the gradients of gamma and beta. As
  /// `batch_norm_backward`; a default `dx`: not needed.
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                batch_norm_backward_options const& options = {}) {
    backward(x, dy, dx, {}, {}, options);
  }

  /// The same after a forward pass with an epilogue, which this has to be. `dresidual` is the gradient of its residual; a
  /// default one: not needed.
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                batch_norm_epilogue<T> const& epilogue, tensor_view<T> dresidual,
                batch_norm_backward_options const& options = {}) {
    batch_norm_backward<T const, P>(exec_, comm_, dy, x, dx, {gamma_, beta_}, saved_, {gamma_grad_, beta_grad_},
                                    options, workspace_, {}, epilogue, dresidual);
  }

  /// `forward` over x itself, of which `backward_in_place` needs no copy: it recovers x from y, up to rounding, where gamma
  /// and the activation allow it; the other channels are kept, see `kept`. The residual has to stay until then, and should not
  /// be far larger than gamma, `recoverable_ratio`. A pass that fails between the parts of its exchange, as by a peer that is lost,
  /// leaves parts of x overwritten.
  void forward_in_place(tensor_view<T> x, batch_norm_epilogue<T> const& epilogue = {}) {
    forward_in_place(std::span{&x, 1}, std::span{&epilogue, 1});
  }
  /// The same of K micro-batches by one statistic, none of which may be in the memory of another one or of its residual.
  void forward_in_place(std::span<tensor_view<T> const> x, std::span<batch_norm_epilogue<T> const> epilogues = {}) {
    bool const has_epilogues = epilogues.size() == x.size(); // of another number they are a fault of the pass
    std::optional<read_only> from;
    auto const fault = detail::fault_or_thrown([&] {
      from.emplace(x);
      if (kept_.size() < x.size()) kept_.resize(x.size());
      for (std::size_t k = 0; k < x.size(); ++k)
        kept_[k].keep(x[k], affine(), has_epilogues ? epilogues[k] : batch_norm_epilogue<T>{});
      return detail::find_shared_in_place(x, epilogues);
    });
    forward_by(views_of(from), x, epilogues, fault);
    in_place_ = {saved_.passes, x.size()};
  }

  /// `backward` after `forward_in_place`, whose y this is; x is in its memory afterwards,
  /// if a position of some rank counts, but not in channels where inv_std is 0, nor elements whose y was not finite. dx may be y or dy.
  void backward_in_place(tensor_view<T> y, tensor_view<T const> dy, tensor_view<T> dx,
                         batch_norm_epilogue<T> const& epilogue = {}, tensor_view<T> dresidual = {},
                         batch_norm_backward_options const& options = {}) {
    bool const wants_dx = dx.is_given();
    backward_in_place(std::span{&y, 1}, std::span{&dy, 1}, std::span{&dx, wants_dx ? 1U : 0U}, std::span{&epilogue, 1},
                      std::span{&dresidual, 1}, options);
  }
  /// The same of the K micro-batches of the latest `forward_in_place`. No dx: not needed.
  void backward_in_place(std::span<tensor_view<T> const> y, std::span<tensor_view<T const> const> dy,
                         std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues = {},
                         std::span<tensor_view<T> const> dresidual = {},
                         batch_norm_backward_options const& options = {}) {
    std::optional<read_only> x;
    auto const fault = detail::fault_or_thrown([&] {
      x.emplace(y);
      return restore(y, epilogues);
    });
    batch_norm_backward_batches<T, P>(exec_, comm_, dy, views_of(x), dx, {gamma_, beta_}, saved_,
                                      {gamma_grad_, beta_grad_}, options, workspace_, {.fault = fault}, epilogues,
                                      dresidual);
  }
  /// What the latest `forward_in_place` of more than `k` micro-batches has kept of the one of this number. Throws
  /// invalid_argument_error where there was none.
  [[nodiscard]] batch_norm_kept<T> const& kept(std::size_t k = 0) const {
    if (k >= kept_.size()) throw invalid_argument_error{"kept: there was no micro-batch " + std::to_string(k)};
    return kept_[k];
  }

  /// `backward` of the K micro-batches of the latest forward pass. No dx, or a default one: not needed.
  void backward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T const> const> dy,
                std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues = {},
                std::span<tensor_view<T> const> dresidual = {}, batch_norm_backward_options const& options = {}) {
    batch_norm_backward_batches<T, P>(exec_, comm_, dy, x, dx, {gamma_, beta_}, saved_, {gamma_grad_, beta_grad_},
                                      options, workspace_, {}, epilogues, dresidual);
  }

  /// The gradients of the latest backward pass, whose x, dy and epilogue these have to be; adds to the gradient of gamma.
  /// As `batch_norm_double_backward`.
  void double_backward(batch_norm_second_order<T, P> const& second, tensor_view<T const> x, tensor_view<T const> dy,
                       tensor_view<T> to_dy, tensor_view<T> to_x, batch_norm_epilogue<T> const& epilogue = {},
                       batch_norm_backward_options const& options = {}) {
    batch_norm_double_backward<T, P>(exec_, comm_, second, dy, x, {gamma_, beta_}, saved_, to_dy, to_x, gamma_grad_,
                                     options, workspace_, {}, epilogue);
  }
  /// `double_backward` of K micro-batches.
  void double_backward(batch_norm_second_order_batches<T, P> const& second, std::span<tensor_view<T const> const> x,
                       std::span<tensor_view<T const> const> dy, std::span<tensor_view<T> const> to_dy,
                       std::span<tensor_view<T> const> to_x, std::span<batch_norm_epilogue<T> const> epilogues = {},
                       batch_norm_backward_options const& options = {}) {
    batch_norm_double_backward_batches<T, P>(exec_, comm_, second, dy, x, {gamma_, beta_}, saved_, to_dy, to_x,
                                             gamma_grad_, options, workspace_, {}, epilogues);
  }

  /// `forward` up to the exchange, which goes on while the caller does something else; `finish` of what is returned
  /// completes it. Collective where `forward` is, and sharing no exchange with it: the two may be mixed.
  [[nodiscard]] pending_passes begin_forward(tensor_view<T const> x, tensor_view<T> y,
                                             batch_norm_epilogue<T> const& epilogue = {}) {
    return or_forget([&] { return begin_pass(comm_, plan_forward(x, y, epilogue), workspace_); });
  }
  /// `backward` in two phases.
  [[nodiscard]] pending_passes begin_backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                                              batch_norm_epilogue<T> const& epilogue = {},
                                              tensor_view<T> dresidual = {},
                                              batch_norm_backward_options const& options = {}) {
    return begin_pass(comm_, plan_backward(x, dy, dx, epilogue, dresidual, options), workspace_);
  }

  /// `forward`, described for a `batch_norm_group`. The layer must stay where it is until the pass is finished.
  [[nodiscard]] batch_norm_pass plan_forward(tensor_view<T const> x, tensor_view<T> y,
                                             batch_norm_epilogue<T> const& epilogue = {}) {
    return plan_forward(std::array<tensor_view<T const>, 1>{x}, std::array{y}, std::span{&epilogue, 1});
  }
  [[nodiscard]] batch_norm_pass plan_forward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
                                             std::span<batch_norm_epilogue<T> const> epilogues = {}) {
    detail::forward_operands<T, P> in{x, y, {gamma_, beta_}, running(), statistics_scope::all_ranks, epilogues};
    if (!by_batch() && options_.track_running_stats)
      return batch_norm_pass{
          std::make_unique<detail::planned_inference<T, P>>(exec_, channels_, in, options_.norm, saved_)};
    if (!by_batch()) in.scope = statistics_scope::this_rank;
    return batch_norm_pass{std::make_unique<detail::planned_forward<T, P>>(exec_, channels_, in, options_.norm, saved_,
                                                                           batch_norm_caller{})};
  }
  /// `backward`, described for a `batch_norm_group`.
  [[nodiscard]] batch_norm_pass plan_backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                                              batch_norm_epilogue<T> const& epilogue = {},
                                              tensor_view<T> dresidual = {},
                                              batch_norm_backward_options const& options = {}) {
    bool const wants_dx = dx.is_given();
    return plan_backward(std::span{&x, 1}, std::span{&dy, 1}, std::span{&dx, wants_dx ? 1U : 0U},
                         std::span{&epilogue, 1}, std::span{&dresidual, 1}, options);
  }
  [[nodiscard]] batch_norm_pass
  plan_backward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T const> const> dy,
                std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues = {},
                std::span<tensor_view<T> const> dresidual = {}, batch_norm_backward_options const& options = {}) {
    return plan_batch_norm_backward<T, P>(exec_, channels_, dy, x, dx, {gamma_, beta_}, saved_,
                                          {gamma_grad_, beta_grad_}, options, {}, epilogues, dresidual);
  }

  /// The same on every rank, since evaluation exchanges nothing.
  void train(bool on = true) noexcept { training_ = on; }
  void eval() noexcept { training_ = false; }
  [[nodiscard]] bool is_training() const noexcept { return training_; }

  /// On: training, too, normalizes by the running statistics, which are constants to the gradients and stay as they are,
  /// without a collective; for fine-tuning on small batches. The same on every rank. A layer without running statistics
  /// then normalizes by its own batch on this rank, as it does in evaluation.
  void freeze_statistics(bool on = true) noexcept { frozen_ = on; }
  [[nodiscard]] bool has_frozen_statistics() const noexcept { return frozen_; }

  /// The running statistics as they were at first: mean 0, var 1, no batches tracked. Local; the same on every rank.
  void reset_running_stats() {
    std::ranges::fill(running_mean_, from_double<P>(0));
    std::ranges::fill(running_var_, from_double<P>(1));
    num_batches_tracked_ = 0;
  }

  void zero_grad() {
    std::ranges::fill(gamma_grad_, from_double<P>(0));
    std::ranges::fill(beta_grad_, from_double<P>(0));
  }

  [[nodiscard]] std::int64_t channels() const noexcept { return channels_; }
  [[nodiscard]] C const& comm() const noexcept { return comm_; }
  [[nodiscard]] batch_norm_layer_options const& options() const noexcept { return options_; }
  /// Statistics of the latest forward pass.
  [[nodiscard]] batch_norm_saved const& saved() const noexcept { return saved_; }

  /// `[C]` each; empty where the layer has no such parameters.
  [[nodiscard]] std::span<P> gamma() noexcept { return gamma_; }
  [[nodiscard]] std::span<P const> gamma() const noexcept { return gamma_; }
  [[nodiscard]] std::span<P> beta() noexcept { return beta_; }
  [[nodiscard]] std::span<P const> beta() const noexcept { return beta_; }
  [[nodiscard]] std::span<P> gamma_grad() noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P const> gamma_grad() const noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P> beta_grad() noexcept { return beta_grad_; }
  [[nodiscard]] std::span<P const> beta_grad() const noexcept { return beta_grad_; }
  /// `[C]` each; empty without running statistics.
  [[nodiscard]] std::span<P> running_mean() noexcept { return running_mean_; }
  [[nodiscard]] std::span<P const> running_mean() const noexcept { return running_mean_; }
  [[nodiscard]] std::span<P> running_var() noexcept { return running_var_; }
  [[nodiscard]] std::span<P const> running_var() const noexcept { return running_var_; }
  /// Training batches that the running statistics have seen.
  [[nodiscard]] std::int64_t& num_batches_tracked() noexcept { return num_batches_tracked_; }
  [[nodiscard]] std::int64_t num_batches_tracked() const noexcept { return num_batches_tracked_; }

private:
  [[nodiscard]] bool by_batch() const noexcept { return training_ && !frozen_; }
  [[nodiscard]] affine_parameters<P> affine() const { return {gamma_, beta_}; }
  [[nodiscard]] running_statistics<P> running() {
    if (!options_.track_running_stats) return {};
    return {running_mean_, running_var_, &num_batches_tracked_};
  }

  /// Views of what is written, to be read.
  class read_only {
  public:
    explicit read_only(std::span<tensor_view<T> const> of)
        : count_{of.size()}, views_{static_cast<std::int64_t>(of.size())} {
      std::ranges::copy(of, views_.data());
    }
    [[nodiscard]] std::span<tensor_view<T const> const> views() const { return {views_.data(), count_}; }

  private:
    std::size_t count_;
    host::detail::scratch_lease<tensor_view<T const>> views_;
  };
  /// None where there was no memory for them, which is a fault of the pass.
  [[nodiscard]] static std::span<tensor_view<T const> const> views_of(std::optional<read_only> const& of) {
    return of ? of->views() : std::span<tensor_view<T const> const>{};
  }

  /// Makes each y of a pass in place x again. Says what is wrong, or nothing.
  [[nodiscard]] std::string restore(std::span<tensor_view<T> const> y,
                                    std::span<batch_norm_epilogue<T> const> epilogues) {
    using detail::call_check;
    auto const batches = y.size();
    if (in_place_.pass != saved_.passes) return "the latest forward pass was not in place, or failed";
    if (batches != in_place_.batches)
      return call_check::text("there are ", batches, " micro-batches of y, expected ", in_place_.batches,
                              " as of the forward pass in place");
    if (!epilogues.empty() && epilogues.size() != batches)
      return call_check::text("there are ", epilogues.size(), " epilogues, expected ", batches,
                              " as micro-batches of y");
    for (std::size_t k = 0; k < batches; ++k) {
      auto const fault =
          kept_[k].restore(exec_, y[k], saved_, epilogues.empty() ? batch_norm_epilogue<T>{} : epilogues[k]);
      if (!fault.empty()) return batches == 1 ? fault : call_check::text("micro-batch ", k, ": ", fault);
    }
    return {};
  }

  /// What f does, a forward pass or its beginning; where it throws, nothing is left for a backward pass.
  template <class F>
  decltype(auto) or_forget(F const& f) {
    return detail::or_forget(saved_, by_batch() ? statistics_scope::all_ranks : statistics_scope::constant,
                             options_.norm.exchange, f);
  }

  /// `fault` is what is wrong already.
  void forward_by(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
                  std::span<batch_norm_epilogue<T> const> epilogues, std::string_view fault) {
    if (by_batch())
      return batch_norm_forward_batches<T, P>(exec_, comm_, x, y, affine(), running(), options_.norm, saved_,
                                              workspace_, {.fault = fault}, epilogues);
    or_forget([&] {
      if (!fault.empty()) throw invalid_argument_error{"batch_norm inference: " + std::string{fault}};
      auto const alone = plan_forward(x, y, epilogues);
      run_alone({&alone, 1});
    });
  }

  C comm_;
  [[no_unique_address]] E exec_;
  batch_norm_layer_options options_;
  std::int64_t channels_;
  std::vector<P> gamma_, beta_, gamma_grad_, beta_grad_, running_mean_, running_var_;
  std::int64_t num_batches_tracked_ = 0;
  bool training_ = true, frozen_ = false;
  batch_norm_saved saved_;
  batch_norm_workspace workspace_;
  std::vector<batch_norm_kept<T>> kept_; // of as many micro-batches as there were
  /// Of the latest forward pass in place: `saved_.passes` after it, and how many micro-batches it had.
  struct {
    std::int64_t pass = -1;
    std::size_t batches = 0;
  } in_place_;
};

} // namespace syncnorm
