#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/ops/power_norm_forward.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/power_norm_check.hpp>
#include <syncnorm/torch/detail/power_norm_function.hpp>
#include <syncnorm/torch/detail/registry.hpp>

namespace syncnorm::torch {

/// Options of PowerNorm and SyncPowerNorm, with the authors' names and defaults, but for `group_num`, which is 1 there.
struct PowerNormOptions {
  /* implicit */ PowerNormOptions(std::int64_t num_features) : num_features_{num_features} {}

  TORCH_ARG(std::int64_t, num_features);
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(double, alpha_fwd) = 0.9;
  TORCH_ARG(double, alpha_bkw) = 0.9;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(std::int64_t, warmup_iters) = 10000;
  /// Groups of channels that are scaled first, as by GroupScaling1D; 0: none.
  TORCH_ARG(std::int64_t, group_num) = 0;
  /// Whether to follow `power_norm_recursion::corrected`.
  TORCH_ARG(bool, corrected) = false;
};

/// What PowerNorm and SyncPowerNorm have in common. Parameters `weight` and `bias`, `[C]`, and buffers `running_phi` and
/// `ema_gz`, `[1, C, 1, 1]`, and `iters`, `[1]`, so that checkpoints of the authors' module load.
///
/// In training an exchange may be in flight between calls, as `power_norm_forward` and `power_norm_backward` say. What reads
/// the state by a member of this class, or saves, loads, clones, converts or switches the module, waits for it first. Who
/// takes the buffers from `buffers()` calls `synchronize()` before.
template <class Derived>
class PowerNormBase : public ::torch::nn::Cloneable<Derived> {
public:
  PowerNormBase(PowerNormOptions const& options_, any_communicator comm)
      : options{options_}, channels_{options_.num_features()}, shared_{make_shared_part(std::move(comm))} {
    reset();
  }

  void reset() override {
    // A clone shares nothing with its original, the exchanges least of all.
    shared_ = make_shared_part(shared_->comm());
    auto const channels = std::max<std::int64_t>(0, channels_);
    bool const affine = made_ ? weight.defined() : options.affine();
    auto const parameter = [&](char const* name) {
      auto const value = affine ? ::torch::empty({channels}) : ::torch::Tensor{};
      return this->register_parameter(name, value, affine);
    };
    weight = parameter("weight");
    bias = parameter("bias");
    auto const shape = std::vector<std::int64_t>{1, channels, 1, 1};
    shared_->running_phi = this->register_buffer("running_phi", ::torch::ones(shape));
    shared_->ema_gz = this->register_buffer("ema_gz", ::torch::zeros(shape));
    shared_->iters = this->register_buffer("iters", ::torch::zeros({1}, ::torch::kLong));
    made_ = true;
    reset_parameters();
  }

  void reset_parameters() {
    synchronize();
    ::torch::NoGradGuard const no_recording;
    shared_->running_phi.fill_(1);
    shared_->ema_gz.zero_();
    shared_->iters.zero_();
    if (!weight.defined()) return;
    weight.fill_(1);
    bias.zero_();
  }

  /// y = weight·z + bias, of float or double, as the module. `[T, B, C]` with a padding mask `[B, T]`; `[N, C]` with `[N]` or
  /// `[N, 1]`; and with more than three dimensions `[N, C, ...]` with `[N, ...]`: true marks padding. Evaluation does not regard
  /// the mask.
  ::torch::Tensor forward(::torch::Tensor const& input, ::torch::Tensor const& pad_mask = {}) {
    auto fault = detail::fault_or_thrown([&] {
      auto text = detail::find_input_fault(input);
      if (!text.empty()) return text;
      auto const in_training = [&](::torch::Tensor const& tensor) {
        return this->is_training() ? tensor : ::torch::Tensor{};
      };
      return detail::find_power_norm_fault(input, in_training(pad_mask), {weight, bias},
                                           {shared_->running_phi, shared_->ema_gz}, in_training(shared_->iters));
    });
    if (fault.empty()) fault = find_recording_fault(input, at::GradMode::is_enabled());
    // With a fault it is the state's type that counts: the exchanges that went before were of it.
    auto const type = fault.empty() ? input.scalar_type() : shared_->running_phi.scalar_type();
    return type == ::torch::kDouble ? run<double>(input, pad_mask, std::move(fault))
                                    : run<float>(input, pad_mask, std::move(fault));
  }

  /// Waits for the exchanges in flight and brings the state up to date. Throws what is wrong with them, on every rank that
  /// calls.
  void synchronize() const { shared_->synchronize(); }

  [[nodiscard]] ::torch::Tensor running_phi() const { return synchronize(), shared_->running_phi; }
  [[nodiscard]] ::torch::Tensor ema_gz() const { return synchronize(), shared_->ema_gz; }
  [[nodiscard]] std::int64_t iters() const { return synchronize(), shared_->iters.template item<std::int64_t>(); }

  void train(bool on = true) override {
    synchronize();
    ::torch::nn::Module::train(on);
  }
  void to(::torch::Device device, ::torch::Dtype dtype, bool non_blocking = false) override {
    converted([&] { ::torch::nn::Module::to(device, dtype, non_blocking); });
  }
  void to(::torch::Dtype dtype, bool non_blocking = false) override {
    converted([&] { ::torch::nn::Module::to(dtype, non_blocking); });
  }
  void to(::torch::Device device, bool non_blocking = false) override {
    converted([&] { ::torch::nn::Module::to(device, non_blocking); });
  }
  void save(::torch::serialize::OutputArchive& archive) const override {
    synchronize();
    ::torch::nn::Module::save(archive);
  }
  void load(::torch::serialize::InputArchive& archive) override {
    synchronize();
    ::torch::nn::Module::load(archive);
  }
  std::shared_ptr<::torch::nn::Module>
  clone(c10::optional<::torch::Device> const& device = c10::nullopt) const override {
    synchronize();
    return ::torch::nn::Cloneable<Derived>::clone(device);
  }

  void pretty_print(std::ostream& stream) const override {
    stream << std::boolalpha << "syncnorm::torch::" << Derived::kind << "(" << options.num_features()
           << ", eps=" << options.eps() << ", alpha_fwd=" << options.alpha_fwd()
           << ", alpha_bkw=" << options.alpha_bkw() << ", affine=" << options.affine()
           << ", warmup_iters=" << options.warmup_iters() << ", group_num=" << options.group_num()
           << ", corrected=" << options.corrected();
    if (Derived::synchronized) stream << ", ranks=" << size(shared_->comm());
    stream << ")";
  }

  /// Becomes a module of the very tensors of `other`, in its mode.
  template <class Other>
  void share_state(PowerNormBase<Other>& other) {
    channels_ = other.channels_;
    take_over(*other.shared_, shared_->comm());
    ::torch::nn::Cloneable<detail::registry>::copy(other, *this);
    weight = other.weight;
    bias = other.bias;
    train(other.is_training());
  }

  /// It is the `num_features` and `affine` with which the module was made that count; the others may be changed between steps, on every
  /// rank.
  PowerNormOptions options;
  /// Undefined without `affine`.
  ::torch::Tensor weight, bias;

protected:
  [[nodiscard]] any_communicator const& comm() const noexcept { return shared_->comm(); }
  void exchange_over(any_communicator comm) { take_over(*shared_, std::move(comm)); }

  // In containers, the mask may be left out.
  bool _forward_has_default_args() override { return true; }
  unsigned int _forward_num_required_args() override { return 1; }
  std::vector<::torch::nn::AnyValue>
  _forward_populate_default_args(std::vector<::torch::nn::AnyValue>&& arguments) override {
    if (arguments.size() < 2) arguments.emplace_back(::torch::Tensor{});
    return std::move(arguments);
  }

private:
  template <typename ModuleType, typename... ArgumentTypes>
  friend struct ::torch::nn::AnyModuleHolder;
  template <class Other>
  friend class PowerNormBase;

  void take_over(detail::power_norm_shared& state, any_communicator comm) {
    auto const next = make_shared_part(std::move(comm));
    state.leave_to(next);
    shared_ = next;
  }

  [[nodiscard]] std::shared_ptr<detail::power_norm_shared> make_shared_part(any_communicator comm) const {
    return std::make_shared<detail::power_norm_shared>(std::move(comm), channels_);
  }
  [[nodiscard]] power_norm_options make_options() const {
    return {.eps = options.eps(),
            .alpha_forward = options.alpha_fwd(),
            .alpha_backward = options.alpha_bkw(),
            .warmup_iters = options.warmup_iters(),
            .groups = options.group_num(),
            .recursion = options.corrected() ? power_norm_recursion::corrected : power_norm_recursion::reference};
  }

  /// The number of steps stays a 64-bit integer, which conversions of all buffers do not know of.
  template <class Convert>
  void converted(Convert const& convert) {
    synchronize();
    auto& iters = shared_->iters;
    auto const before = iters.clone();
    convert();
    if (iters.scalar_type() != ::torch::kLong) iters.set_data(before.to(iters.device()));
  }

  /// What keeps autograd from recording a pass over `input`, which in training it does whatever needs a gradient.
  [[nodiscard]] std::string find_recording_fault(::torch::Tensor const& input, bool records) const {
    bool needs = this->is_training();
    for (auto const* tensor : {&input, &weight, &bias}) needs = needs || (tensor->defined() && tensor->requires_grad());
    return detail::find_recording_fault({{input, "the input"}, {weight, "weight"}, {bias, "bias"}}, records && needs);
  }

  template <class T>
  ::torch::Tensor run(::torch::Tensor const& input, ::torch::Tensor const& pad_mask, std::string fault) {
    bool const training = this->is_training(), records = at::GradMode::is_enabled();
    auto const pass = c10::make_intrusive<detail::recorded_power_norm>();
    pass->shared = shared_;
    pass->options = make_options();
    pass->is_double = std::is_same_v<T, double>;
    detail::operands<T> of_input;
    ::torch::Tensor x, gamma, beta, counts;
    affine_parameters<T> affine;
    mask_view mask;
    {
      at::AutoGradMode const no_recording{false};
      detail::attempt(fault, [&] {
        of_input = detail::make_operands<T>(detail::channels_second(input));
        detail::in_huge_pages(of_input.y);
        if (weight.defined()) affine.gamma = detail::values_of<T>(gamma = detail::in_memory(weight).contiguous());
        if (bias.defined()) affine.beta = detail::values_of<T>(beta = detail::in_memory(bias).contiguous());
        if (training && pad_mask.defined()) {
          counts = detail::counting_mask(pad_mask, of_input.order);
          mask = mask_of(counts.data_ptr<bool>(), of_input.x_view.samples, of_input.x_view.spatial);
        }
      });
      compute(of_input, affine, mask, *pass, {fault, records});
      if (pass->saved.pass->faulty) substitute(input, of_input, records);
    }
    // Even a rank that needs no gradient has its part in ema_gz.
    c10::optional<at::Tensor> anchor;
    if (training && records) anchor = at::zeros({0}).requires_grad_();
    auto const optional = [](::torch::Tensor const& tensor) {
      return tensor.defined() ? c10::optional<at::Tensor>{tensor} : c10::nullopt;
    };
    return detail::channels_back(detail::power_norm_function::apply(detail::channels_second(input), optional(weight),
                                                                    optional(bias), anchor, pass, &of_input.y));
  }

  template <class T>
  void compute(detail::operands<T> const& of_input, affine_parameters<T> const& affine, mask_view const& mask,
               detail::recorded_power_norm& pass, power_norm_caller const& caller) {
    auto& workspace = shared_->workspace<T>();
    if (this->is_training())
      return power_norm_forward<T, T>(at_executor{}, shared_->comm(), of_input.x_view, of_input.y_view, mask, affine,
                                      shared_->state<T>(), pass.options, pass.saved, workspace, caller);
    workspace.finish_forward();
    if (!caller.fault.empty()) throw invalid_argument_error{"power_norm inference: " + std::string{caller.fault}};
    power_norm_inference<T, T>(at_executor{}, of_input.x_view, of_input.y_view, affine,
                               detail::values_of<T>(shared_->running_phi), pass.options, pass.saved);
  }

  /// What a pass gives whose fault the other ranks do not know of yet, and hence this one must not throw: no numbers. Where
  /// the input is such that there is no output like it, or none that is recorded, waits for the others and throws.
  template <class T>
  void substitute(::torch::Tensor const& input, detail::operands<T>& of_input, bool records) {
    bool const possible = input.defined() && input.layout() == at::kStrided && input.device().is_cpu() &&
                          input.is_floating_point() && input.dim() >= 2 && find_recording_fault(input, records).empty();
    if (!possible) shared_->workspace<T>().finish_forward();
    of_input.y = at::full_like(detail::channels_second(input), std::numeric_limits<double>::quiet_NaN());
  }

  std::int64_t channels_; ///< those that its tensors have been made for, whatever `options` say since
  bool made_ = false;     ///< so that there is a weight or not, whatever `options` say since
  std::shared_ptr<detail::power_norm_shared> shared_;
};

/// Power normalization of this rank's batch alone.
class PowerNormImpl : public PowerNormBase<PowerNormImpl> {
public:
  static constexpr char const* kind = "PowerNorm";
  static constexpr bool synchronized = false;

  explicit PowerNormImpl(PowerNormOptions const& options_) : PowerNormBase{options_, self_communicator{}} {}

  // A member of this class, by which libtorch's containers tell what it is.
  ::torch::Tensor forward(::torch::Tensor const& input, ::torch::Tensor const& pad_mask = {}) {
    return PowerNormBase::forward(input, pad_mask);
  }
};

/// Power normalization over the batch of all ranks of a communicator, in training; otherwise as PowerNorm.
///
/// In training mode `forward` and its backward pass are collective, and every rank joins both: a rank with an empty batch
/// passes an input of no samples. While gradients are recorded the output requires them on every rank, and every rank runs the
/// backward pass. In evaluation mode both are local. What is wrong on one rank is thrown on every rank, in the warm-up by the
/// pass itself, afterwards, and in a warm-up that begins again after it, by the next call that needs its result; a rank that has a
/// fault of its own, and every rank in such a warm-up, goes on till then with an output of NaN, or throws where there can be no
/// output. Gradients of weight and bias are sums over this rank, as of any
/// other parameter. They cannot be differentiated again.
class SyncPowerNormImpl : public PowerNormBase<SyncPowerNormImpl> {
public:
  static constexpr char const* kind = "SyncPowerNorm";
  static constexpr bool synchronized = true;

  explicit SyncPowerNormImpl(PowerNormOptions const& options_, any_communicator over = self_communicator{})
      : PowerNormBase{options_, std::move(over)} {}

  // A member of this class, by which libtorch's containers tell what it is.
  ::torch::Tensor forward(::torch::Tensor const& input, ::torch::Tensor const& pad_mask = {}) {
    return PowerNormBase::forward(input, pad_mask);
  }

  [[nodiscard]] any_communicator const& communicator() const noexcept { return comm(); }
  /// The communicator of the passes to come, after those in flight. Passes that are recorded keep theirs, and their backward passes
  /// wait for what is in flight, their own exchange among it. The same on every rank.
  void set_communicator(any_communicator over) { exchange_over(std::move(over)); }
};

/// Holds a PowerNormImpl.
class PowerNorm : public ::torch::nn::ModuleHolder<PowerNormImpl> {
public:
  using Impl = PowerNormImpl;
  using ::torch::nn::ModuleHolder<PowerNormImpl>::ModuleHolder;
};

/// Holds a SyncPowerNormImpl.
class SyncPowerNorm : public ::torch::nn::ModuleHolder<SyncPowerNormImpl> {
public:
  using Impl = SyncPowerNormImpl;
  using ::torch::nn::ModuleHolder<SyncPowerNormImpl>::ModuleHolder;
};

} // namespace syncnorm::torch
