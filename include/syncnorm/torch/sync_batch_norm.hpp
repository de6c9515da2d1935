#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/batch_norm_forward.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/function.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch {

namespace detail {
class batches_of;
}

/// Batch normalization over the batch of all ranks of a communicator, in training; with its options, state and modes
/// otherwise those of torch::nn::BatchNorm1d, 2d and 3d, so that checkpoints of either load into the other.
///
/// The input is `[N, C, …]` of float, double, or of Half or BFloat16 with a module of the same type or of float, in any
/// memory format, which the output keeps. In training mode `forward`
/// and its backward pass are collective, and every rank joins both: a rank with an empty batch passes an input of N = 0,
/// and where some rank needs gradients, the output requires them on all. In evaluation mode both are local.
///
/// What is wrong on one rank is thrown on every rank, as invalid_argument_error or mismatch_error, and leaves the
/// running statistics as they were. Gradients of weight and bias are sums over this rank, as of any other parameter.
/// With `create_graph`, on every rank, they can be differentiated once more, which is collective, too.
class SyncBatchNormImpl : public ::torch::nn::Cloneable<SyncBatchNormImpl> {
public:
  /// `revert_dimension` is which of BatchNorm1d, 2d and 3d `revert_sync_batchnorm` makes of the module. `parts` says
  /// which of weight and bias there are, where `options.affine()`.
  explicit SyncBatchNormImpl(::torch::nn::BatchNormOptions const& options_, any_communicator comm = self_communicator{},
                             int revert_dimension = 2, affine_parts parts = affine_parts::gamma_and_beta)
      : options{options_}, revert_dimension_{revert_dimension}, parts_{parts}, state_{make_state(std::move(comm))} {
    reset();
  }

  void reset() override {
    // A clone shares nothing with its original, the buffers of the exchange least of all.
    state_ = make_state(state_->comm);
    auto const channels = options.num_features() > 0 ? options.num_features() : 0;
    auto const parameter = [&](char const* name, bool exists) {
      return register_parameter(name, exists ? ::torch::empty({channels}) : ::torch::Tensor{}, exists);
    };
    weight = parameter("weight", options.affine() && parts_ != affine_parts::beta);
    bias = parameter("bias", options.affine() && parts_ != affine_parts::gamma);
    bool const tracks = options.track_running_stats();
    running_mean = register_buffer("running_mean", tracks ? ::torch::zeros({channels}) : ::torch::Tensor{});
    running_var = register_buffer("running_var", tracks ? ::torch::ones({channels}) : ::torch::Tensor{});
    num_batches_tracked =
        register_buffer("num_batches_tracked", tracks ? ::torch::zeros({}, ::torch::kLong) : ::torch::Tensor{});
    reset_parameters();
  }

  void reset_running_stats() {
    if (!options.track_running_stats()) return;
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
    auto fault = detail::find_fault(input, {weight, bias}, {running_mean, running_var}, num_batches_tracked);
    if (fault.empty()) fault = detail::find_fault(epilogue, input);
    auto const type = fault.empty() ? input.scalar_type() : ::torch::kFloat;
    auto const parameters = detail::type_of_parameters(input, {weight, bias, running_mean, running_var});
    return detail::with_types(type, parameters, [&]<class Types>(Types) {
      using T = typename Types::element;
      return run<T, typename Types::parameter>(input, epilogue, parameters, std::move(fault));
    });
  }

  void pretty_print(std::ostream& stream) const override {
    stream << std::boolalpha << "syncnorm::torch::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
           << ", momentum=";
    if (options.momentum())
      stream << *options.momentum();
    else
      stream << "None";
    stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
           << ", ranks=" << size(state_->comm) << (in_place_ ? ", in_place=true" : "") << ")";
  }

  [[nodiscard]] any_communicator const& communicator() const noexcept { return state_->comm; }

  /// The communicator of the passes to come. Passes that are recorded keep theirs. The same on every rank.
  void set_communicator(any_communicator comm) {
    bool const exchange = state_->exchange_backward;
    state_ = make_state(std::move(comm));
    state_->exchange_backward = exchange;
  }

  /// Off: backward passes are local, as if the other ranks' gradients were zero; for the steps of a gradient
  /// accumulation but the last. It is the setting at the time of the backward pass that counts. The same on every rank.
  void set_backward_exchange(bool on) noexcept { state_->exchange_backward = on; }
  [[nodiscard]] bool backward_exchange() const noexcept { return state_->exchange_backward; }

  /// On: training, too, normalizes by the running statistics, as in evaluation mode: they are constants to the gradients,
  /// stay as they are, and nothing is collective. It outlasts `train` and `eval`. The same on every rank.
  void freeze_statistics(bool on = true) noexcept { frozen_ = on; }
  [[nodiscard]] bool has_frozen_statistics() const noexcept { return frozen_; }

  /// What `running_var` holds; unbiased variances unless set, as in libtorch. The same on every rank.
  void set_running_variance(running_variance kind) noexcept { running_variance_ = kind; }
  [[nodiscard]] running_variance running_variance_kind() const noexcept { return running_variance_; }

  /// On: `forward` writes over its input, which it returns, as torch::nn::ReLU does with `inplace`. A backward pass recovers
  /// the input from the output, up to rounding, where weight, bias and activation allow it, and `batch_norm_kept` keeps the
  /// other channels. So sizeof(element) bytes per element are kept instead of twice that. The input must not be a leaf that
  /// requires a gradient, nor a result that its own backward pass needs; and nothing may write to the output until the
  /// backward pass, whose gradients cannot be differentiated. The same on every rank.
  void set_in_place(bool on = true) noexcept { in_place_ = on; }
  [[nodiscard]] bool is_in_place() const noexcept { return in_place_; }

  /// How ranks put their statistics together: by the cost model unless set. The same on every rank.
  void set_exchange_policy(exchange_policy policy) noexcept { policy_ = policy; }

  [[nodiscard]] int revert_dimension() const noexcept { return revert_dimension_; }

  ::torch::nn::BatchNormOptions options;
  /// Undefined without `affine`, or where the module has no such part.
  ::torch::Tensor weight, bias;
  /// Undefined without `track_running_stats`.
  ::torch::Tensor running_mean, running_var, num_batches_tracked;

private:
  friend class detail::batches_of;

  [[nodiscard]] std::shared_ptr<detail::exchange_state> make_state(any_communicator comm) const {
    return std::make_shared<detail::exchange_state>(
        detail::exchange_state{std::move(comm), batch_norm_workspace{options.num_features()}});
  }

  [[nodiscard]] batch_norm_options make_options() const {
    batch_norm_options made{.eps = options.eps(), .variance = running_variance_, .exchange = policy_};
    made.momentum.reset();
    if (options.momentum()) made.momentum = *options.momentum();
    return made;
  }

  template <class T, class P>
  ::torch::Tensor run(::torch::Tensor const& input, norm_epilogue const& with, ::torch::Dtype parameters,
                      std::string fault) {
    bool const records = at::GradMode::is_enabled();
    bool const needs = records && (requires_grad(input) || requires_grad(weight) || requires_grad(bias) ||
                                   requires_grad(with.residual));
    auto const pass = c10::make_intrusive<detail::recorded_pass>();
    pass->state = state_;
    pass->parameters = parameters;
    pass->activation = with.activation;
    pass->masked = with.masked;
    detail::operands<T> of_input;
    affine_parameters<P> affine;
    running_statistics<P> running;
    batch_norm_epilogue<T> epilogue{.activation = with.activation};
    ::torch::Tensor gamma, beta, residual = with.residual;
    std::int64_t batches = 0;
    {
      at::AutoGradMode const no_recording{false};
      try {
        if (fault.empty()) {
          if (in_place_) {
            at::AutoGradMode const recording{records};
            ::torch::autograd::check_inplace(input, needs);
          }
          of_input = in_place_ ? detail::make_operands_in_place<T>(input) : detail::make_operands<T>(input);
          if (weight.defined()) affine.gamma = detail::values_of<P>(gamma = weight.contiguous());
          if (bias.defined()) affine.beta = detail::values_of<P>(beta = bias.contiguous());
          if (residual.defined()) epilogue.residual = detail::make_companion<T>(residual, of_input);
          if (with.mask.defined()) pass->mask = detail::dense_mask(with.mask, of_input.order);
          epilogue.mask = detail::view_of_mask(pass->mask);
          epilogue.masked = with.masked;
          if (in_place_) pass->kept = keep<T, P>(of_input, affine, epilogue, records);
          running = {detail::values_of<P>(running_mean), detail::values_of<P>(running_var)};
          // Module::to converts this buffer, too, so it may be of any type.
          if (num_batches_tracked.defined()) batches = num_batches_tracked.item<std::int64_t>();
          if (num_batches_tracked.defined()) running.num_batches_tracked = &batches;
        }
      } catch (std::exception const& e) {
        fault = detail::text_of(e);
      }
      auto const backward = !records ? backward_pass::impossible
                            : needs  ? backward_pass::needed
                                     : backward_pass::possible;
      auto const batches_before = batches;
      compute(of_input, affine, running, epilogue, *pass, {fault, backward});
      if (batches != batches_before) num_batches_tracked.fill_(batches);
    }
    c10::optional<at::Tensor> anchor;
    if (pass->saved.backward_needed && !needs) anchor = at::zeros({0}).requires_grad_();
    auto output = detail::batch_norm_function::apply(input, optional(weight), optional(bias), optional(with.residual),
                                                     anchor, pass, &of_input.y);
    return in_place_ ? input : output; // the same, unless nothing is recorded
  }

  /// What a pass in place keeps of x, where it is recorded.
  template <class T, class P>
  static std::shared_ptr<void const> keep(detail::operands<T> const& of_input, affine_parameters<P> const& affine,
                                          batch_norm_epilogue<T> const& epilogue, bool records) {
    auto const& x = of_input.x_view;
    if (epilogue.has_residual() && epilogue.residual.data == x.data && x.size() > 0)
      throw invalid_argument_error{"the residual is in the memory of the input, which a pass in place writes to"};
    auto kept = std::make_shared<batch_norm_kept<T>>();
    if (records) kept->keep(x, affine, epilogue);
    return kept;
  }

  template <class T, class P>
  void compute(detail::operands<T> const& of_input, affine_parameters<P> const& affine,
               running_statistics<P> const& running, batch_norm_epilogue<T> const& epilogue,
               detail::recorded_pass& pass, batch_norm_caller const& caller) {
    auto const& x = of_input.x_view;
    auto const& y = of_input.y_view;
    auto const norm = make_options();
    at_executor const exec;
    if (is_training() && !frozen_) {
      auto& workspace = state_->workspace;
      batch_norm_forward<T, P>(exec, state_->comm, x, y, affine, running, norm, pass.saved, workspace, caller,
                               epilogue);
      if (pass.saved.count > 0) detail::bump_versions({running_mean, running_var});
      return;
    }
    if (!caller.fault.empty()) throw invalid_argument_error{"batch_norm inference: " + std::string{caller.fault}};
    if (!running.mean.empty()) {
      batch_norm_inference<T, P>(exec, x, y, affine, running.mean, running.var, norm.eps, pass.saved, norm.variance,
                                 epilogue);
    } else {
      batch_norm_workspace workspace{options.num_features()};
      batch_norm_forward<T, P>(exec, self_communicator{}, x, y, affine, {}, norm, pass.saved, workspace, {}, epilogue);
      pass.saved.scope = statistics_scope::this_rank;
    }
  }

  static bool requires_grad(::torch::Tensor const& tensor) { return tensor.defined() && tensor.requires_grad(); }
  static c10::optional<at::Tensor> optional(::torch::Tensor const& tensor) {
    if (!tensor.defined()) return c10::nullopt;
    return tensor;
  }

  int revert_dimension_;
  affine_parts parts_;
  bool frozen_ = false, in_place_ = false;
  running_variance running_variance_ = running_variance::unbiased;
  exchange_policy policy_ = exchange_policy::automatic;
  std::shared_ptr<detail::exchange_state> state_;
};

/// Holds a SyncBatchNormImpl, as torch::nn::BatchNorm2d holds a BatchNorm2dImpl.
class SyncBatchNorm : public ::torch::nn::ModuleHolder<SyncBatchNormImpl> {
public:
  using Impl = SyncBatchNormImpl;
  using ::torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
};

/// `set_backward_exchange` of every SyncBatchNorm in `root`.
inline void set_backward_exchange(::torch::nn::Module& root, bool on) {
  root.apply([on](::torch::nn::Module& module) {
    if (auto* norm = module.as<SyncBatchNormImpl>()) norm->set_backward_exchange(on);
  });
}

} // namespace syncnorm::torch
