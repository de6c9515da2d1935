#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/ops/power_norm_backward.hpp>
#include <syncnorm/ops/power_norm_state.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/refuse_differentiation.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// What the passes of a power norm module have in common: its state, and the exchanges that are in flight. A pass that is
/// recorded keeps it, whatever becomes of the module.
class power_norm_shared {
public:
  power_norm_shared(any_communicator comm, std::int64_t channels)
      : comm_{std::move(comm)}, of_float_{channels}, of_double_{channels} {}

  [[nodiscard]] any_communicator const& comm() const noexcept { return comm_; }

  /// The tensors of the state, of the module's element type but for `iters`, which is one 64-bit integer.
  at::Tensor running_phi, ema_gz, iters;

  /// What a pass over elements of `T` sees of the state: of tensors of another type or device, nothing, which is its fault.
  template <class T>
  [[nodiscard]] power_norm_state<T> state() const {
    auto const values = [](at::Tensor const& tensor) {
      bool const fits = tensor.device().is_cpu() && tensor.scalar_type() == c10::CppTypeToScalarType<T>::value;
      return fits ? values_of<T>(tensor) : std::span<T>{};
    };
    bool const counts = iters.device().is_cpu() && iters.scalar_type() == at::kLong;
    auto* const steps = counts ? iters.data_ptr<std::int64_t>() : nullptr;
    return {values(running_phi), values(ema_gz), steps};
  }

  template <class T>
  [[nodiscard]] power_norm_workspace<any_communicator, T>& workspace() {
    if constexpr (std::is_same_v<T, double>)
      return of_double_;
    else
      return of_float_;
  }

  /// Leaves the state to `next`, over which the passes to come are. The backward passes of those that are recorded stay here.
  void leave_to(std::shared_ptr<power_norm_shared> const& next) {
    synchronize();
    next->running_phi = running_phi;
    next->ema_gz = ema_gz;
    next->iters = iters;
    next_ = next;
  }

  /// f(), a backward pass that is a step of the state. Once that is left to another, passes here and there wait for each other in this
  /// alone.
  template <class F>
  void step_back(F const& f) {
    auto* latest = this;
    while (latest->next_ != nullptr) latest = latest->next_.get();
    if (latest == this) return f();
    latest->synchronize();
    f();
    synchronize();
  }

  void synchronize() {
    std::exception_ptr error;
    try {
      of_float_.synchronize();
    } catch (...) {
      error = std::current_exception();
    }
    of_double_.synchronize();
    if (error != nullptr) std::rethrow_exception(error);
  }

private:
  any_communicator comm_;
  power_norm_workspace<any_communicator, float> of_float_;
  power_norm_workspace<any_communicator, double> of_double_;
  std::shared_ptr<power_norm_shared> next_; // null: the state is this one's
};

/// What a recorded forward pass leaves for its backward pass, besides tensors.
struct recorded_power_norm : ::torch::CustomClassHolder {
  std::shared_ptr<power_norm_shared> shared;
  power_norm_options options;
  power_norm_saved saved;
  bool is_double = false;
};

/// Records a forward pass that has been computed already, and runs its backward pass.
class power_norm_function : public ::torch::autograd::Function<power_norm_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  /// Returns y, recorded as a function of x, weight and bias, the latter of which may be absent. `anchor` requires a
  /// gradient, so that this rank joins the backward pass even where it needs no gradient itself.
  static at::Tensor forward(context* recorded, at::Tensor const& x, c10::optional<at::Tensor> const& weight,
                            c10::optional<at::Tensor> const& bias, c10::optional<at::Tensor> const& /*anchor*/,
                            c10::intrusive_ptr<recorded_power_norm> const& pass, at::Tensor const* y) {
    recorded->save_for_backward({x, weight.value_or(at::Tensor{})});
    recorded->saved_data["pass"] = c10::IValue::make_capsule(pass);
    recorded->saved_data["weight"] = weight.has_value();
    recorded->saved_data["bias"] = bias.has_value();
    return *y;
  }

  static tensors backward(context* recorded, tensors const& dy) {
    auto const pass = c10::static_intrusive_pointer_cast<recorded_power_norm>(recorded->saved_data["pass"].toCapsule());
    at::Tensor x, weight;
    std::string fault;
    // Tells of tensors that were modified since, and of a graph that was freed, on this rank alone.
    if (auto const saved = saved_tensors(*recorded, fault); fault.empty()) x = saved.at(0), weight = saved.at(1);
    auto gradients = pass->is_double ? run<double>(*recorded, *pass, x, weight, dy.at(0), std::move(fault))
                                     : run<float>(*recorded, *pass, x, weight, dy.at(0), std::move(fault));
    refuse_differentiation("syncnorm::torch::PowerNorm: its gradients cannot be differentiated (double backward)",
                           gradients, {dy.at(0), x, weight});
    return gradients;
  }

private:
  template <class T>
  static tensors run(context const& recorded, recorded_power_norm const& pass, at::Tensor const& x,
                     at::Tensor const& weight, at::Tensor dy, std::string fault) {
    at::AutoGradMode const no_recording{false};
    bool const has_weight = recorded.saved_data.at("weight").toBool(),
               has_bias = recorded.saved_data.at("bias").toBool();
    // Edges lead to the inputs that are present: x, weight, bias.
    bool const wants_x = recorded.needs_input_grad(0);
    bool const wants_weight = has_weight && recorded.needs_input_grad(1);
    bool const wants_bias = has_bias && recorded.needs_input_grad(has_weight ? 2 : 1);

    operands<T> of_x;
    tensor_view<T const> dy_view;
    tensor_view<T> dx_view;
    affine_parameters<T> affine;
    affine_gradients<T> gradients;
    at::Tensor gamma, dx, dgamma, dbeta;
    auto const type = c10::CppTypeToScalarType<T>::value, now = pass.shared->running_phi.scalar_type();
    if (fault.empty() && now != type)
      fault = syncnorm::detail::call_check::text("running_phi is of ", now, ", in the forward pass of ", type);
    if (fault.empty()) fault = find_gradient_fault(dy, /*recorded=*/false);
    attempt(fault, [&] {
      of_x = make_operands<T>(x);
      dy_view = make_companion<T>(dy, of_x);
      if (wants_x) dx = in_huge_pages(of_x.y), dx_view = of_x.y_view;
      if (has_weight) affine.gamma = values_of<T>(gamma = in_memory(weight).contiguous());
      if (wants_weight) gradients.gamma = values_of<T>(dgamma = at::zeros({x.size(1)}, x.options()));
      if (wants_bias) gradients.beta = values_of<T>(dbeta = at::zeros({x.size(1)}, x.options()));
    });
    auto& shared = *pass.shared;
    auto const compute = [&] {
      power_norm_backward<T const, T>(at_executor{}, shared.comm(), dy_view, of_x.x_view, dx_view, affine,
                                      shared.state<T>(), pass.options, pass.saved, gradients, shared.workspace<T>(),
                                      {.fault = fault});
    };
    pass.saved.pass->constant ? compute() : shared.step_back(compute);
    return {dx, dgamma, dbeta, {}, {}, {}};
  }
};

} // namespace syncnorm::torch::detail
