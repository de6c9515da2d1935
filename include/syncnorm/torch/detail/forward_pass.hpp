#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/types.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_forward.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/epilogue.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// What a forward pass of a module reads and writes, of whatever type.
struct forward_inputs {
  at::Tensor input;
  norm_epilogue with;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  batch_norm_options options{};
  std::int64_t channels = 0;
  statistics_scope scope = statistics_scope::all_ranks;
  bool in_place = false;
  std::shared_ptr<exchange_state> state{};

  /// Whether autograd asks for one of the gradients.
  [[nodiscard]] bool requires_grad() const {
    for (auto const* tensor : {&input, &weight, &bias, &with.residual})
      if (tensor->defined() && tensor->requires_grad()) return true;
    return false;
  }
  /// Has copies in place of inference tensors, none of which needs a gradient: others may, and then all are saved.
  void make_savable() {
    for (auto* tensor : {&input, &weight, &bias, &with.residual}) *tensor = savable(*tensor);
  }
};

/// A forward pass of a module, to be run at once, or described for others to run in two phases, and then recorded.
class forward_pass {
public:
  virtual ~forward_pass() = default;
  forward_pass(forward_pass const&) = delete;
  forward_pass& operator=(forward_pass const&) = delete;

  /// Runs the pass. Collective in training.
  void run() {
    at::AutoGradMode const no_recording{false};
    before();
    compute();
    after();
  }
  /// The pass that `plan_of` describes completes between these two. Throws where the input was written to since.
  void before() {
    if (version_ != version_of(in_.input))
      throw invalid_argument_error{"batch_norm forward: the input was written to before the pass was finished"};
    if (tracked_.defined()) in_.state->batches_tracked = tracks_ = tracked_.item<std::int64_t>();
  }
  void after() {
    if (in_.scope != statistics_scope::all_ranks) return;
    if (pass_->saved.count > 0) bump_versions({in_.running_mean, in_.running_var});
    if (tracked_.defined() && in_.state->batches_tracked != tracks_)
      write_counter(tracked_, in_.state->batches_tracked);
  }

  [[nodiscard]] forward_inputs const& inputs() const noexcept { return in_; }
  [[nodiscard]] c10::intrusive_ptr<recorded_pass> const& pass() const noexcept { return pass_; }
  [[nodiscard]] at::Tensor const& output() const noexcept { return output_; }
  /// Whether this rank reports a fault, after which there is nothing to record.
  [[nodiscard]] bool is_faulty() const noexcept { return !fault_.empty(); }
  /// Whether gradients are recorded.
  [[nodiscard]] bool records() const noexcept { return backward_ != backward_pass::impossible; }

protected:
  forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters, std::string fault,
               backward_pass backward)
      : in_{std::move(in)}, fault_{std::move(fault)}, backward_{backward}, pass_{c10::make_intrusive<recorded_pass>()},
        version_{version_of(in_.input)} {
    pass_->state = in_.state;
    pass_->element = element;
    pass_->parameters = parameters;
    pass_->activation = in_.with.activation;
    pass_->masked = in_.with.masked;
  }

  virtual void compute() = 0;

  forward_inputs in_;
  std::string fault_;
  backward_pass backward_; ///< what this rank needs or lacks
  c10::intrusive_ptr<recorded_pass> pass_;
  at::Tensor output_;
  at::Tensor mean_, var_, tracked_; ///< the running statistics, wherever the module's go meanwhile

private:
  [[nodiscard]] static std::int64_t version_of(at::Tensor const& tensor) {
    return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
  }

  std::int64_t version_, tracks_ = 0;
};

/// The same for elements of type `T` and parameters of type `P`.
template <class T, class P>
class typed_forward_pass final : public forward_pass {
public:
  /// `fault` is what is wrong already.
  typed_forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters, std::string fault,
                     backward_pass backward)
      : forward_pass{std::move(in), element, parameters, std::move(fault), backward} {
    at::AutoGradMode const no_recording{false};
    epilogue_.activation = in_.with.activation;
    try {
      if (fault_.empty()) take();
    } catch (std::exception const& e) {
      fault_ = text_of(e);
    }
    output_ = of_.y;
  }

  /// Describes the pass. It borrows this.
  [[nodiscard]] batch_norm_pass plan() {
    syncnorm::detail::forward_operands<T, P> const operands{{&of_.x_view, 1}, {&of_.y_view, 1}, affine_,
                                                            running_,         in_.scope,        {&epilogue_, 1}};
    batch_norm_caller const caller{fault_, backward_};
    auto& saved = pass_->saved;
    if (in_.scope == statistics_scope::constant)
      return batch_norm_pass{std::make_unique<syncnorm::detail::planned_inference<T, P>>(
          at_executor{}, in_.channels, operands, in_.options, saved, caller)};
    return batch_norm_pass{std::make_unique<syncnorm::detail::planned_forward<T, P>>(
        at_executor{}, in_.channels, operands, in_.options, saved, caller)};
  }

private:
  void compute() override {
    auto& saved = pass_->saved;
    at_executor const exec;
    if (in_.scope == statistics_scope::all_ranks) {
      batch_norm_forward<T, P>(exec, in_.state->comm, of_.x_view, of_.y_view, affine_, running_, in_.options, saved,
                               in_.state->workspace, {fault_, backward_}, epilogue_);
      return;
    }
    if (!fault_.empty()) throw invalid_argument_error{"batch_norm inference: " + fault_};
    if (in_.scope == statistics_scope::constant) {
      batch_norm_inference<T, P>(exec, of_.x_view, of_.y_view, affine_, running_.mean, running_.var, in_.options.eps,
                                 saved, in_.options.variance, epilogue_);
      return;
    }
    batch_norm_workspace workspace{in_.channels};
    batch_norm_forward<T, P>(exec, self_communicator{}, of_.x_view, of_.y_view, affine_, {}, in_.options, saved,
                             workspace, {}, epilogue_);
    saved.scope = statistics_scope::this_rank;
  }

  void take() {
    auto const& input = in_.input;
    if (in_.in_place) {
      at::AutoGradMode const recording{records()};
      ::torch::autograd::check_inplace(input, backward_ == backward_pass::needed);
    }
    of_ = in_.in_place ? make_operands_in_place<T>(input) : make_operands<T>(input);
    if (in_.weight.defined()) affine_.gamma = values_of<P>(gamma_ = in_.weight.contiguous());
    if (in_.bias.defined()) affine_.beta = values_of<P>(beta_ = in_.bias.contiguous());
    residual_ = in_.with.residual;
    if (residual_.defined()) epilogue_.residual = make_companion<T>(residual_, of_);
    if (in_.with.mask.defined()) pass_->mask = dense_mask(in_.with.mask, of_.order);
    epilogue_.mask = view_of_mask(pass_->mask);
    epilogue_.masked = in_.with.masked;
    if (in_.in_place) keep();
    if (in_.scope == statistics_scope::this_rank || !in_.running_mean.defined()) return;
    mean_ = in_.running_mean.detach(), var_ = in_.running_var.detach();
    running_ = {values_of<P>(mean_), values_of<P>(var_)};
    if (in_.scope == statistics_scope::constant || !in_.num_batches_tracked.defined()) return;
    tracked_ = in_.num_batches_tracked; // of any type, as Module::to converts it, too
    running_.num_batches_tracked = &in_.state->batches_tracked;
  }

  /// What a pass in place keeps of x, where it is recorded.
  void keep() {
    auto const& x = of_.x_view;
    if (epilogue_.has_residual() && epilogue_.residual.data == x.data && x.size() > 0)
      throw invalid_argument_error{"the residual is in the memory of the input, which a pass in place writes to"};
    auto kept = std::make_shared<batch_norm_kept<T>>();
    if (records()) kept->keep(x, affine_, epilogue_);
    pass_->kept = std::move(kept);
  }

  operands<T> of_;
  affine_parameters<P> affine_;
  running_statistics<P> running_;
  batch_norm_epilogue<T> epilogue_;
  at::Tensor gamma_, beta_, residual_;
};

/// Says what this rank needs of a backward pass, given whether it records and whether it needs gradients.
[[nodiscard]] inline backward_pass backward_of(bool records, bool needs) {
  return !records ? backward_pass::impossible : needs ? backward_pass::needed : backward_pass::possible;
}

/// Whether passes over these tensors are those of `use_cuda`. That is for the module's own tensors to say, which are where
/// they are on every rank; without any, there are no others.
[[nodiscard]] inline bool is_on_device(forward_inputs const& in) {
  if (in.state->device == nullptr) return false;
  for (auto const* tensor : {&in.weight, &in.bias, &in.running_mean, &in.running_var})
    if (tensor->defined()) return tensor->is_cuda();
  return true;
}

/// What is wrong with a pass over these tensors on the device `on`, besides what it checks for itself; empty where nothing is.
[[nodiscard]] inline std::string find_fault(forward_inputs const& in, backward_pass backward,
                                            at::Device on = at::kCPU) {
  auto fault =
      find_fault(in.input, {in.weight, in.bias}, {in.running_mean, in.running_var}, in.num_batches_tracked, on);
  if (fault.empty()) fault = find_fault(in.with, in.input, on);
  if (fault.empty() && in.in_place && in.input.is_inference() && !c10::InferenceMode::is_enabled())
    fault = "the input is an inference tensor, which is written to in place in c10::InferenceMode alone";
  if (fault.empty())
    fault = find_recording_fault(
        {{in.input, "the input"}, {in.weight, "weight"}, {in.bias, "bias"}, {in.with.residual, "the residual"}},
        backward == backward_pass::needed);
  return fault;
}

/// A pass over these tensors, whose faults it reports to all ranks.
[[nodiscard]] inline std::unique_ptr<forward_pass> make_forward_pass(forward_inputs in, backward_pass backward,
                                                                     std::string fault = {}) {
  auto const& [input, with, weight, bias, mean, var, tracked, options, channels, scope, in_place, state] = in;
  if (fault.empty()) fault = find_fault(in, backward);
  if (fault.empty() && backward == backward_pass::possible) in.make_savable();
  auto const type = fault.empty() ? input.scalar_type() : ::torch::kFloat;
  auto const parameters = type_of_parameters(input, {weight, bias, mean, var});
  return with_types(type, parameters, [&]<class Types>(Types) -> std::unique_ptr<forward_pass> {
    return std::make_unique<typed_forward_pass<typename Types::element, typename Types::parameter>>(
        std::move(in), type, parameters, std::move(fault), backward);
  });
}

/// The same on the device where the module is.
[[nodiscard]] inline std::unique_ptr<forward_pass> make_pass_anywhere(forward_inputs in, backward_pass backward) {
  if (!is_on_device(in)) return make_forward_pass(std::move(in), backward);
  auto const device = in.state->device;
  return device->make_forward_pass(std::move(in), backward);
}

/// Throws where the pass would be on a device: there are no `passes` of that kind.
inline void require_on_cpu(forward_inputs const& in, char const* passes) {
  if (is_on_device(in))
    throw invalid_argument_error{std::string{"syncnorm::torch::SyncBatchNorm: "} + passes +
                                 " are not implemented on CUDA, where the module is; on the CPU they are"};
}

/// Describes the pass. It borrows the pass.
[[nodiscard]] inline batch_norm_pass plan_of(forward_pass& pass) {
  // Not a virtual function, which every user would compile.
  return with_types(pass.pass()->element, pass.pass()->parameters, [&]<class Types>(Types) {
    return static_cast<typed_forward_pass<typename Types::element, typename Types::parameter>&>(pass).plan();
  });
}

} // namespace syncnorm::torch::detail
