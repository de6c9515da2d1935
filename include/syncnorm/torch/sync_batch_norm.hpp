#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/epilogue.hpp>
#include <syncnorm/torch/pending_forward.hpp>

namespace syncnorm::torch {

namespace detail {
class batches_of;
class device_of;
class members_of;
} // namespace detail

/// Batch normalization over the batch of all ranks of a communicator, in training; with its options, state and modes
/// otherwise those of torch::nn::BatchNorm1d, 2d and 3d, so that checkpoints of either load into the other.
///
/// The input is `[N, C, …]` of float, double, or of Half or BFloat16 with a module of the same type or of float, in any
/// memory format, which the output keeps. In training mode `forward`
/// and its backward pass are collective, and every rank joins both: a rank with an empty batch passes an input of N = 0,
/// and where some rank needs gradients, the output requires them on all. In evaluation mode both are local.
///
/// What is wrong on one rank is thrown on every rank, as invalid_argument_error or mismatch_error, and leaves the running statistics as
/// they were. Gradients of weight and bias are sums over this rank, as of any other parameter. With `create_graph`, on every rank and
/// by losses of one structure, they can be differentiated once more, which is collective, too, and not done through an exponential
/// activation; then each rank has to need some gradient of the pass. One thread at a time runs passes in training and their backward
/// passes, of one rank alone, too.
///
/// Unlike in libtorch, a batch that is empty on every rank leaves `num_batches_tracked`, too, as it was, a momentum outside
/// [0, 1] or a negative eps is an error, and an infinity in the input may make its channel's running mean NaN, not infinite.
class SyncBatchNormImpl : public ::torch::nn::Cloneable<SyncBatchNormImpl> {
public:
  /// `revert_dimension` is which of BatchNorm1d, 2d and 3d `revert_sync_batchnorm` makes of the module. `parts` says
  /// which of weight and bias there are, where `options.affine()`.
  explicit SyncBatchNormImpl(::torch::nn::BatchNormOptions const& options_, any_communicator comm = self_communicator{},
                             int revert_dimension = 2, affine_parts parts = affine_parts::gamma_and_beta)
      : options{options_}, revert_dimension_{revert_dimension}, parts_{parts} {
    state_ = make_state(std::move(comm), options.num_features());
    reset();
  }

  void reset() override {
    // A clone shares nothing with its original, the buffers of the exchange least of all.
    auto const device = state_->device;
    renew_state(state_->comm, this->channels());
    state_->exchange_backward = std::make_shared<bool>(*state_->exchange_backward);
    if (device != nullptr) state_->device = device->renewed();
    auto const channels = std::max<std::int64_t>(0, this->channels());
    auto const parameter = [&](char const* name, bool exists) {
      return register_parameter(name, exists ? ::torch::empty({channels}) : ::torch::Tensor{}, exists);
    };
    weight = parameter("weight", made_ ? weight.defined() : options.affine() && parts_ != affine_parts::beta);
    bias = parameter("bias", made_ ? bias.defined() : options.affine() && parts_ != affine_parts::gamma);
    bool const tracks = made_ ? running_mean.defined() : options.track_running_stats();
    running_mean = register_buffer("running_mean", tracks ? ::torch::zeros({channels}) : ::torch::Tensor{});
    running_var = register_buffer("running_var", tracks ? ::torch::ones({channels}) : ::torch::Tensor{});
    num_batches_tracked =
        register_buffer("num_batches_tracked", tracks ? ::torch::zeros({}, ::torch::kLong) : ::torch::Tensor{});
    made_ = true;
    reset_parameters();
  }

  void reset_running_stats() {
    if (!running_mean.defined()) return;
    running_mean.zero_();
    running_var.fill_(1);
    num_batches_tracked.zero_();
  }

  void reset_parameters() {
    reset_running_stats();
    ::torch::NoGradGuard const no_recording;
    if (weight.defined()) weight.fill_(1);
    if (bias.defined()) bias.zero_();
  }

  /// y = (input − mean)/√(var + eps)·weight + bias, by the statistics of the batch over all ranks in training mode, by
  /// the running statistics, or without these by this rank's batch, in evaluation mode.
  ::torch::Tensor forward(::torch::Tensor const& input) { return forward_with(input, {}); }

  /// The same with an activation, a residual added before it, and a mask `[N, …]` of the positions that count:
  /// f(forward(input) + residual), or 0. The residual has a gradient.
  ::torch::Tensor forward_with(::torch::Tensor const& input, norm_epilogue const& epilogue) {
    auto inputs = inputs_of({input}, {epilogue});
    auto const backward = detail::backward_of(at::GradMode::is_enabled(), inputs.requires_grad());
    auto const pass = detail::make_pass_anywhere(std::move(inputs), backward);
    pass->run();
    return detail::record({&pass, 1}, false, detail::needs_anchor(*pass)).front();
  }

  /// Starts the exchange of `forward_with`, and returns while it is under way, given a communicator with `allgather_async`, or
  /// CUDA tensors and one that does not block:
  ///
  ///     auto pending = norm->begin_forward(x);
  ///     ... // anything else, other passes among it
  ///     auto const y = pending.finish();
  ///
  /// Collective in training; `finish` is not, and passes may be finished in any order, but several of one module in the same on
  /// all ranks, since each moves its running statistics. Until then neither input, residual nor module may be written to. A rank
  /// that drops a pass has no part in its backward pass, so the others must not run that. Passes in place are recorded when they
  /// are finished, so all ranks finish them in the same order.
  [[nodiscard]] pending_forward begin_forward(::torch::Tensor const& input, norm_epilogue const& epilogue = {}) {
    auto inputs = inputs_of({input}, {epilogue});
    auto const backward = detail::backward_of(at::GradMode::is_enabled(), inputs.requires_grad());
    std::vector<std::unique_ptr<detail::forward_pass>> passes;
    passes.push_back(detail::make_pass_anywhere(std::move(inputs), backward));
    return pending_forward{{std::move(passes), false}};
  }

  void pretty_print(std::ostream& stream) const override {
    stream << std::boolalpha << "syncnorm::torch::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
           << ", momentum=";
    if (options.momentum())
      stream << *options.momentum();
    else
      stream << "None";
    stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
           << ", ranks=" << std::max(syncnorm::size(state_->comm), state_->device ? state_->device->size() : 1)
           << (in_place_ ? ", in_place=true" : "") << ")";
  }

  [[nodiscard]] any_communicator const& communicator() const noexcept { return state_->comm; }

  /// The communicator of the passes to come, of CPU tensors; those of CUDA tensors are given anew by `use_cuda`. Passes that are
  /// recorded keep theirs. The same on every rank.
  void set_communicator(any_communicator comm) { renew_state(std::move(comm), channels()); }

  /// Off: backward passes are local, as if the other ranks' gradients were zero; for the steps of a gradient
  /// accumulation but the last. It is the setting at the time of the backward pass that counts, of passes that were recorded before the
  /// module got another communicator, too. The same on every rank.
  void set_backward_exchange(bool on) noexcept { *state_->exchange_backward = on; }
  [[nodiscard]] bool backward_exchange() const noexcept { return *state_->exchange_backward; }

  /// On: training, too, normalizes by the running statistics, as in evaluation mode: they are constants to the gradients,
  /// stay as they are, and nothing is collective. It outlasts `train` and `eval`. The same on every rank.
  void freeze_statistics(bool on = true) noexcept { frozen_ = on; }
  [[nodiscard]] bool has_frozen_statistics() const noexcept { return frozen_; }

  /// What `running_var` holds; unbiased variances unless set, as in libtorch. The same on every rank.
  void set_running_variance(running_variance kind) noexcept { running_variance_ = kind; }
  [[nodiscard]] running_variance running_variance_kind() const noexcept { return running_variance_; }

  /// By which variance of a batch it is normalized; the biased one unless set, as in libtorch. The same on every rank.
  void set_batch_variance(batch_variance kind) noexcept { normalize_by_ = kind; }
  [[nodiscard]] batch_variance batch_variance_kind() const noexcept { return normalize_by_; }

  /// On: `forward` writes over its input, which it returns, as torch::nn::ReLU does with `inplace`. A backward pass recovers
  /// the input from the output, up to rounding, where weight, bias and activation allow it, and `batch_norm_kept` keeps the
  /// other channels. So sizeof(element) bytes per element are kept instead of twice that. The input must not be a leaf that
  /// requires a gradient, nor a result that its own backward pass needs; and nothing may write to the output, nor, of CUDA tensors,
  /// to weight and bias, until the backward pass, whose gradients cannot be differentiated; of what optimizers like SGD write to
  /// parameters autograd knows nothing. Views are inputs like others, if no element is there twice and positions are as far apart
  /// from one to the next, but that a pass by itself over one part of a tensor counts as a change of what passes before it have made of
  /// other parts. Where a communicator fails midway, `forward` leaves the
  /// input partly written over, of which autograd is told. The same on every rank.
  void set_in_place(bool on = true) noexcept { in_place_ = on; }
  [[nodiscard]] bool is_in_place() const noexcept { return in_place_; }

  /// How ranks put their statistics together: by the cost model unless set. The same on every rank.
  void set_exchange_policy(exchange_policy policy) noexcept { policy_ = policy; }
  [[nodiscard]] exchange_policy policy() const noexcept { return policy_; }

  /// Waits for the passes of CUDA tensors so far, and throws what has failed in them, the same on every rank; see `use_cuda`. Of
  /// CPU tensors everything is known, and done, when a pass returns.
  void synchronize() {
    if (state_->device != nullptr) state_->device->synchronize();
  }

  [[nodiscard]] int revert_dimension() const noexcept { return revert_dimension_; }

  /// It is the `num_features` and `affine` with which the module was made that count, as for its clones. Where
  /// `track_running_stats` is turned off later, running statistics, which stay there, are neither read nor changed, on every rank.
  ::torch::nn::BatchNormOptions options;
  /// Undefined without `affine`, or where the module has no such part.
  ::torch::Tensor weight, bias;
  /// Undefined without `track_running_stats`.
  ::torch::Tensor running_mean, running_var, num_batches_tracked;

private:
  friend class detail::batches_of;
  friend class detail::members_of;
  friend class detail::device_of;

  [[nodiscard]] static std::shared_ptr<detail::exchange_state> make_state(any_communicator comm,
                                                                          std::int64_t channels) {
    return std::make_shared<detail::exchange_state>(
        detail::exchange_state{std::move(comm), batch_norm_workspace{channels}});
  }
  /// Those that its tensors have been made for, whatever `options` say since.
  [[nodiscard]] std::int64_t channels() const { return state_->workspace.exchange.channels(); }

  /// Leaves what is shared so far to others, but for the setting.
  void renew_state(any_communicator comm, std::int64_t channels) {
    auto exchange = state_->exchange_backward;
    state_ = make_state(std::move(comm), channels);
    state_->exchange_backward = std::move(exchange);
  }

  [[nodiscard]] batch_norm_options make_options() const {
    batch_norm_options made{
        .eps = options.eps(), .variance = running_variance_, .exchange = policy_, .normalize_by = normalize_by_};
    made.momentum.reset();
    if (options.momentum()) made.momentum = *options.momentum();
    return made;
  }

  [[nodiscard]] detail::forward_inputs inputs_of(std::vector<::torch::Tensor> batches,
                                                 std::vector<norm_epilogue> epilogues) const {
    auto const tracked = [tracks = options.track_running_stats()](::torch::Tensor const& tensor) {
      return tracks ? tensor : ::torch::Tensor{};
    };
    detail::forward_inputs in{std::move(batches),   std::move(epilogues),        weight, bias, tracked(running_mean),
                              tracked(running_var), tracked(num_batches_tracked)};
    in.options = make_options();
    in.channels = channels();
    in.scope = is_training() && !frozen_   ? statistics_scope::all_ranks
               : in.running_mean.defined() ? statistics_scope::constant
                                           : statistics_scope::this_rank;
    in.in_place = in_place_;
    in.state = state_;
    return in;
  }

  int revert_dimension_;
  affine_parts parts_;
  bool made_ = false; ///< so that it is its tensors which say what it has, whatever `options` say since
  bool frozen_ = false, in_place_ = false;
  running_variance running_variance_ = running_variance::unbiased;
  batch_variance normalize_by_ = batch_variance::biased;
  exchange_policy policy_ = exchange_policy::automatic;
  std::shared_ptr<detail::exchange_state> state_;
};

/// Holds a SyncBatchNormImpl, as torch::nn::BatchNorm2d holds a BatchNorm2dImpl.
class SyncBatchNorm : public ::torch::nn::ModuleHolder<SyncBatchNormImpl> {
public:
  using Impl = SyncBatchNormImpl;
  using ::torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
};

/// Calls f(norm) once for every SyncBatchNorm in `root`, which may be one itself, as for a setting of them all:
///
///     for_each_sync_batch_norm(*net, [](SyncBatchNormImpl& norm) { norm.freeze_statistics(); });
template <std::invocable<SyncBatchNormImpl&> F>
void for_each_sync_batch_norm(::torch::nn::Module& root, F const& f) {
  std::vector<SyncBatchNormImpl*> found; // a module may be in several places
  root.apply([&](::torch::nn::Module& module) {
    auto* const norm = module.as<SyncBatchNormImpl>();
    if (norm != nullptr && std::ranges::find(found, norm) == found.end()) found.push_back(norm);
  });
  for (auto* const norm : found) f(*norm);
}

/// `set_backward_exchange` of every SyncBatchNorm in `root`.
inline void set_backward_exchange(::torch::nn::Module& root, bool on) {
  for_each_sync_batch_norm(root, [on](SyncBatchNormImpl& norm) { norm.set_backward_exchange(on); });
}

/// `synchronize` of every SyncBatchNorm in `root`.
inline void synchronize(::torch::nn::Module& root) {
  for_each_sync_batch_norm(root, [](SyncBatchNormImpl& norm) { norm.synchronize(); });
}

} // namespace syncnorm::torch
