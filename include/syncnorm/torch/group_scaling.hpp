#pragma once

#include <cstdint>
#include <ostream>

#include <torch/arg.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/host/group_scaling.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/power_norm_check.hpp>
#include <syncnorm/torch/detail/power_norm_function.hpp>
#include <syncnorm/torch/detail/refuse_differentiation.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch {

namespace detail {

/// `group_scaling` of `[N, C, ...]`, recorded.
class group_scaling_function : public ::torch::autograd::Function<group_scaling_function> {
public:
  using context = ::torch::autograd::AutogradContext;
  using tensors = ::torch::autograd::variable_list;

  static at::Tensor forward(context* recorded, at::Tensor const& x, std::int64_t groups, double eps) {
    recorded->save_for_backward({x});
    recorded->saved_data["groups"] = groups;
    recorded->saved_data["eps"] = eps;
    return by_type(x, [&]<class T>(T) {
      auto const of_x = make_operands<T>(x);
      in_huge_pages(of_x.y);
      host::group_scaling<T>(at_executor{}, of_x.x_view, of_x.y_view, {groups, eps});
      return of_x.y;
    });
  }

  static tensors backward(context* recorded, tensors const& gradients) {
    if (auto const fault = find_gradient_fault(gradients.at(0), /*recorded=*/false); !fault.empty())
      throw invalid_argument_error{"group_scaling backward: " + fault};
    auto const x = recorded->get_saved_variables().at(0);
    host::channel_scaling const scaling{recorded->saved_data["groups"].toInt(), recorded->saved_data["eps"].toDouble()};
    at::Tensor dx;
    {
      at::AutoGradMode const no_recording{false};
      dx = by_type(x, [&]<class T>(T) {
        auto const of_x = make_operands<T>(x);
        in_huge_pages(of_x.y);
        at::Tensor dy = gradients.at(0);
        auto const dy_view = make_companion<T>(dy, of_x);
        host::group_scaling_backward<T>(at_executor{}, dy_view, of_x.x_view, of_x.y_view, scaling);
        return of_x.y;
      });
    }
    tensors all{dx, {}, {}};
    refuse_differentiation("syncnorm::torch::GroupScaling1D: its gradients cannot be differentiated (double backward)",
                           all, {gradients.at(0), x});
    return all;
  }

private:
  template <class F>
  static at::Tensor by_type(at::Tensor const& x, F const& f) {
    return x.scalar_type() == at::kDouble ? f(double{}) : f(float{});
  }
};

} // namespace detail

/// Options of GroupScaling1D.
struct GroupScaling1DOptions {
  /* implicit */ GroupScaling1DOptions(std::int64_t group_num) : group_num_{group_num} {}

  TORCH_ARG(std::int64_t, group_num);
  TORCH_ARG(double, eps) = 1e-5;
};

/// Scales each group of channels to a mean square of about 1, at each position for itself; see `host::group_scaling`.
/// `[T, B, C]`, `[N, C]`, or with more than three dimensions `[N, C, ...]`, of float or double. Local; has neither parameters nor
/// state.
class GroupScaling1DImpl : public ::torch::nn::Cloneable<GroupScaling1DImpl> {
public:
  explicit GroupScaling1DImpl(GroupScaling1DOptions const& options_) : options{options_} {}

  void reset() override {}

  /// Throws invalid_argument_error.
  ::torch::Tensor forward(::torch::Tensor const& input) {
    if (auto const fault = detail::find_input_fault(input); !fault.empty())
      throw invalid_argument_error{"group_scaling: " + fault};
    return detail::channels_back(
        detail::group_scaling_function::apply(detail::channels_second(input), options.group_num(), options.eps()));
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "syncnorm::torch::GroupScaling1D(" << options.group_num() << ", eps=" << options.eps() << ")";
  }

  GroupScaling1DOptions options;
};

/// Holds a GroupScaling1DImpl.
class GroupScaling1D : public ::torch::nn::ModuleHolder<GroupScaling1DImpl> {
public:
  using Impl = GroupScaling1DImpl;
  using ::torch::nn::ModuleHolder<GroupScaling1DImpl>::ModuleHolder;
};

} // namespace syncnorm::torch
