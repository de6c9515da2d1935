#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/ops/batch_norm_forward.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// A forward pass of a module on the CPU, of elements of type `T` and parameters of type `P`.
template <class T, class P>
class typed_forward_pass final : public prepared_forward_pass<T, P> {
  using base = prepared_forward_pass<T, P>;
  using base::affine_, base::backward_, base::epilogues_, base::fault_, base::in_, base::memory_, base::pass_,
      base::running_, base::x_views_, base::y_views_;

public:
  /// `fault` is what is wrong already.
  typed_forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters, std::string fault,
                     backward_pass backward);

  void before() override {
    base::before();
    if (tracked_.defined()) read_counter();
  }
  void after() override {
    base::after();
    if (in_.scope != statistics_scope::all_ranks) return;
    if (pass_->saved.count > 0) bump_versions({in_.running_mean, in_.running_var});
    if (tracked_.defined() && in_.state->batches_tracked != tracks_)
      write_counter(tracked_, in_.state->batches_tracked);
  }

  /// Describes the pass. It borrows this.
  [[nodiscard]] batch_norm_pass plan();

private:
  void compute() override {
    if (in_.scope != statistics_scope::all_ranks) {
      auto const alone = plan();
      return run_alone({&alone, 1});
    }
    batch_norm_forward_batches<T, P>(at_executor{}, in_.state->comm, x_views_, y_views_, affine_, running_, in_.options,
                                     pass_->saved, in_.state->workspace, {fault_, backward_}, epilogues_);
  }

  void read_counter() {
    in_.state->batches_tracked = tracks_ =
        in_.num_batches_tracked.template item<std::int64_t>(); // of any type, as Module::to converts it, too
  }

  at::Tensor tracked_;
  std::int64_t tracks_ = 0;
};

// As of `prepared_forward_pass`.

template <class T, class P>
typed_forward_pass<T, P>::typed_forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters,
                                             std::string fault, backward_pass backward)
    : base{std::move(in), element, parameters, std::move(fault), backward} {
  attempt(this->fault_, [&] {
    if (in_.in_place) {
      auto kept = std::make_shared<std::vector<batch_norm_kept<T>>>(x_views_.size());
      for (std::size_t k = 0; k < kept->size() && this->records(); ++k)
        (*kept)[k].keep(x_views_[k], affine_, epilogues_[k]);
      memory_->kept = std::move(kept);
      pass_->in_place = true;
    }
    if (!this->counts()) return;
    read_counter();
    tracked_ = in_.num_batches_tracked;
    running_.num_batches_tracked = &in_.state->batches_tracked;
  });
  if (!fault_.empty()) this->outputs_.clear();
}

template <class T, class P>
batch_norm_pass typed_forward_pass<T, P>::plan() {
  syncnorm::detail::forward_operands<T, P> const operands{x_views_, y_views_, affine_, running_, in_.scope, epilogues_};
  batch_norm_caller const caller{fault_, backward_};
  auto& saved = pass_->saved;
  if (in_.scope == statistics_scope::constant)
    return batch_norm_pass{std::make_unique<syncnorm::detail::planned_inference<T, P>>(
        at_executor{}, in_.channels, operands, in_.options, saved, caller)};
  return batch_norm_pass{std::make_unique<syncnorm::detail::planned_forward<T, P>>(
      at_executor{}, in_.channels, operands, in_.options, saved, caller)};
}

/// A pass over these tensors on the CPU, whose faults it reports to all ranks.
[[nodiscard]] inline std::unique_ptr<forward_pass> make_forward_pass(forward_inputs in, backward_pass backward,
                                                                     std::string fault = {}) {
  if (fault.empty()) fault = find_fault(in, backward);
  if (fault.empty() && backward == backward_pass::possible) in.make_savable();
  auto const type = fault.empty() ? in.first().scalar_type() : ::torch::kFloat;
  auto const parameters = in.type_of_parameters();
  return with_types(type, parameters, [&]<class Types>(Types) -> std::unique_ptr<forward_pass> {
    return std::make_unique<typed_forward_pass<typename Types::element, typename Types::parameter>>(
        std::move(in), type, parameters, std::move(fault), backward);
  });
}

/// The same where the module is.
[[nodiscard]] inline std::unique_ptr<forward_pass> make_pass_anywhere(forward_inputs in, backward_pass backward,
                                                                      std::string fault = {}) {
  if (!is_on_device(in)) return make_forward_pass(std::move(in), backward, std::move(fault));
  auto const device = in.state->device;
  auto const on = device->place_of(in);
  return device->make_forward_pass(std::move(in), backward, std::move(fault), on);
}

/// Describes the pass. It borrows the pass.
[[nodiscard]] inline batch_norm_pass plan_of(forward_pass& pass) {
  // Not a virtual function, which every user would compile.
  return with_types(pass.pass()->element, pass.pass()->parameters, [&]<class Types>(Types) {
    return static_cast<typed_forward_pass<typename Types::element, typename Types::parameter>&>(pass).plan();
  });
}

} // namespace syncnorm::torch::detail
