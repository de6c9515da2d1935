#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/ops/batch_norm_in_place.hpp>
#include <syncnorm/ops/batch_norm_micro_batches.hpp>
#include <syncnorm/ops/batch_norm_pass.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/detail/double_backward.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/in_place_history.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/refuse_differentiation.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// What a forward pass read, as far as its backward pass needs it: x of each micro-batch, or y where x is recovered from it.
struct forward_tensors {
  std::vector<at::Tensor> x;
  at::Tensor weight, bias;
  std::vector<at::Tensor> residuals; ///< of each micro-batch, as far as its values are needed
  at::Tensor memory{};               ///< by which the memory of the pass stays

  /// Those to be saved of a pass over `x`.
  [[nodiscard]] static forward_tensors of(forward_pass const& pass, std::vector<at::Tensor> x, at::Tensor const& weight,
                                          at::Tensor const& bias, std::vector<at::Tensor> residuals) {
    // What was activated depends on bias and residual; so does x where it is recovered from y.
    bool const in_place = pass.pass()->in_place;
    bool activated = false;
    for (std::size_t k = 0; k < residuals.size(); ++k) {
      bool const activates = !pass.pass()->epilogues[k].activation.is_identity();
      activated |= activates;
      if (!in_place && !activates) residuals[k].reset();
    }
    for (std::size_t k = 0; k < x.size() && in_place; ++k) x[k] = output_to_save(pass.outputs()[k], x[k]);
    return {std::move(x), weight, in_place || activated ? bias : at::Tensor{}, std::move(residuals),
            pass.saved_memory()};
  }

  /// Appends them to what is saved.
  void append_to(std::vector<at::Tensor>& saved) const {
    saved.insert(saved.end(), x.begin(), x.end());
    saved.insert(saved.end(), {weight, bias});
    saved.insert(saved.end(), residuals.begin(), residuals.end());
    saved.push_back(memory);
  }
  /// Those of `batches` micro-batches, which were appended, from `next` on.
  [[nodiscard]] static forward_tensors take_from(std::vector<at::Tensor>::const_iterator& next, std::size_t batches) {
    auto const end_of_x = next + static_cast<std::ptrdiff_t>(batches), residuals = end_of_x + 2;
    auto const end = residuals + static_cast<std::ptrdiff_t>(batches);
    forward_tensors taken{{next, end_of_x}, end_of_x[0], end_of_x[1], {residuals, end}, *end};
    next = end + 1;
    return taken;
  }
};

/// Which gradients autograd asks for.
struct wanted_gradients {
  std::vector<bool> x, residuals; ///< of each micro-batch
  bool weight = false, bias = false;

  [[nodiscard]] bool any_x() const { return std::ranges::find(x, true) != x.end(); }
  [[nodiscard]] bool any() const {
    return any_x() || weight || bias || std::ranges::find(residuals, true) != residuals.end();
  }
};

/// A backward pass of a module, to be run at once, or described for others to run.
class backward_call {
public:
  using tensors = ::torch::autograd::variable_list;

  virtual ~backward_call() = default;
  backward_call(backward_call const&) = delete;
  backward_call& operator=(backward_call const&) = delete;

  /// Runs the pass. Collective after a pass in training.
  virtual void run() = 0;
  /// As of a `forward_pass`.
  [[nodiscard]] virtual std::unique_ptr<device_plan> plan_on_device() { return nullptr; }
  [[nodiscard]] c10::intrusive_ptr<recorded_pass> const& pass() const noexcept { return pass_; }

  /// The gradients of each x, weight, bias and each residual, once the pass has run, themselves differentiable if autograd asks
  /// for that. Of the passes of a group each is differentiated by itself.
  [[nodiscard]] tensors results() {
    tensors gradients(dy_.size());
    for (std::size_t k = 0; k < dx_.size(); ++k)
      if (wants_.x[k]) gradients[k] = dx_[k];
    gradients.insert(gradients.end(), {dgamma_, dbeta_});
    gradients.insert(gradients.end(), dresiduals_.begin(), dresiduals_.end());
    gradients.resize(2 * dy_.size() + 2);
    if (!at::GradMode::is_enabled()) return gradients;
    if (pass_->in_place) {
      auto inputs = dy_;
      of_.append_to(inputs);
      refuse_differentiation(
          "syncnorm::torch::SyncBatchNorm: the gradients of a pass in place (double backward) cannot be differentiated",
          gradients, inputs);
    } else {
      batch_norm_backward_function::record(gradients, dy_, of_.x, of_.weight,
                                           {pass_, of_.bias, of_.residuals, of_.memory});
    }
    return gradients;
  }

protected:
  backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of, tensors dy, wanted_gradients wants)
      : pass_{std::move(pass)}, of_{std::move(of)}, memory_{pass_->memory.lock()}, dy_{std::move(dy)}, wants_{std::move(
                                                                                                           wants)} {}

  c10::intrusive_ptr<recorded_pass> pass_;
  forward_tensors of_;
  std::shared_ptr<pass_memory> memory_;
  tensors dy_;
  wanted_gradients wants_;
  tensors dx_, dresiduals_; ///< none, or one of each x
  at::Tensor dgamma_, dbeta_;
};

/// The same for elements of type `T` and parameters of type `P`: what a pass reads and writes, wherever it runs.
template <class T, class P>
class prepared_backward_call : public backward_call {
protected:
  /// `fault` is what is wrong already.
  prepared_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of, tensors dy, wanted_gradients wants,
                         std::string fault);

  std::string fault_;
  backward_pass differentiable_;
  std::vector<tensor_view<T const>> x_views_, dy_views_;
  std::vector<tensor_view<T>> dx_views_; ///< none, or one of each x
  std::vector<tensor_view<T>> dresidual_views_;
  affine_parameters<P> affine_;
  affine_gradients<P> gradients_;
  std::vector<batch_norm_epilogue<T>> epilogues_;
  tensors read_x_, recovered_; ///< where each x of a pass in place goes
  std::vector<tensor_view<T>> recovered_views_;

private:
  void take();

  tensors read_dy_, read_residuals_;
  at::Tensor gamma_, beta_;
};

// As of `prepared_forward_pass`.

template <class T, class P>
prepared_backward_call<T, P>::prepared_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of,
                                                     tensors dy, wanted_gradients wants, std::string fault)
    : backward_call{std::move(pass), std::move(of), std::move(dy), std::move(wants)}, fault_{std::move(fault)} {
  if (fault_.empty()) fault_ = find_memory_fault(*pass_, memory_);
  bool const recorded = at::GradMode::is_enabled() && !pass_->in_place && wants_.any();
  differentiable_ = recorded ? backward_pass::needed : backward_pass::impossible;
  for (auto const& each : dy_)
    if (fault_.empty()) fault_ = find_gradient_fault(each, recorded);
  attempt(fault_, [&] { take(); });
}

template <class T, class P>
void prepared_backward_call<T, P>::take() {
  bool const wants_x = wants_.any_x();
  read_dy_ = dy_, read_residuals_ = of_.residuals; // which may become copies
  for (std::size_t k = 0; k < of_.x.size(); ++k) {
    auto const of = make_operands<T>(of_.x[k]);
    read_x_.push_back(of.x);
    x_views_.push_back(of.x_view);
    dy_views_.push_back(make_companion<T>(read_dy_.at(k), of));
    if (wants_x || pass_->in_place) in_huge_pages(of.y);
    if (wants_x) dx_.push_back(of.y), dx_views_.push_back(of.y_view);
    // x is made again where its gradient will be.
    if (pass_->in_place) recovered_.push_back(of.y), recovered_views_.push_back(of.y_view);
    auto const& [activation, masked] = pass_->epilogues[k];
    auto& residual = read_residuals_.at(k);
    // For one whose values are not needed, dy stands in.
    auto const absent = wants_.residuals[k] ? dy_views_.back() : tensor_view<T const>{};
    epilogues_.push_back(
        {activation, residual.defined() ? make_companion<T>(residual, of) : absent, mask_in(memory_, k), masked});
    auto& dresidual = dresiduals_.emplace_back();
    auto& to_residual = dresidual_views_.emplace_back();
    if (wants_.residuals[k]) to_residual = *view_of<T>(dresidual = in_huge_pages(at::empty_like(of.y)), of.order);
  }
  auto const& first = read_x_.front();
  if (of_.weight.defined()) affine_.gamma = values_of<P>(gamma_ = in_memory(of_.weight).contiguous());
  if (of_.bias.defined()) affine_.beta = values_of<P>(beta_ = in_memory(of_.bias).contiguous());
  auto const zeros = [&] { return at::zeros({pass_->channels}, first.options().dtype(pass_->parameters)); };
  if (wants_.weight) gradients_.gamma = values_of<P>(dgamma_ = zeros());
  if (wants_.bias) gradients_.beta = values_of<P>(dbeta_ = zeros());
}

/// The same on the CPU.
template <class T, class P>
class typed_backward_call final : public prepared_backward_call<T, P> {
  using base = prepared_backward_call<T, P>;
  using base::affine_, base::differentiable_, base::dresidual_views_, base::dx_views_, base::dy_views_,
      base::epilogues_, base::fault_, base::gradients_, base::memory_, base::pass_, base::recovered_views_,
      base::x_views_;

public:
  /// `fault` is what is wrong already.
  typed_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of, backward_call::tensors dy,
                      wanted_gradients wants, std::string fault);

  void run() override {
    at::AutoGradMode const no_recording{false};
    std::optional<batch_norm_workspace> own;
    auto& workspace = pass_->workspace_or(own);
    batch_norm_backward_batches<T, P>(at_executor{}, pass_->state->comm, dy_views_, x_views_, dx_views_, affine_,
                                      pass_->saved, gradients_, {*pass_->state->exchange_backward}, workspace,
                                      {fault_, differentiable_}, epilogues_, dresidual_views_);
  }

  /// Describes the pass. It borrows this.
  [[nodiscard]] batch_norm_pass plan();
};

template <class T, class P>
typed_backward_call<T, P>::typed_backward_call(c10::intrusive_ptr<recorded_pass> pass, forward_tensors of,
                                               backward_call::tensors dy, wanted_gradients wants, std::string fault)
    : base{std::move(pass), std::move(of), std::move(dy), std::move(wants), std::move(fault)} {
  if (!pass_->in_place || !fault_.empty()) return;
  fault_ = fault_or_thrown([&] {
    std::string found;
    auto const& kept = *static_cast<std::vector<batch_norm_kept<T>> const*>(memory_->kept.get());
    for (std::size_t k = 0; k < kept.size() && found.empty(); ++k) {
      found = kept[k].recover(at_executor{}, x_views_[k], recovered_views_[k], pass_->saved, epilogues_[k]);
      x_views_[k] = recovered_views_[k];
    }
    return found;
  });
}

template <class T, class P>
batch_norm_pass typed_backward_call<T, P>::plan() {
  auto const channels = static_cast<std::int64_t>(pass_->saved.mean.size());
  return plan_batch_norm_backward<T, P>(at_executor{}, channels, dy_views_, x_views_, dx_views_, affine_, pass_->saved,
                                        gradients_, {*pass_->state->exchange_backward}, {fault_, differentiable_},
                                        epilogues_, dresidual_views_);
}

/// A backward pass by `dy`, which throws faults of any rank on every rank.
[[nodiscard]] inline std::unique_ptr<backward_call> make_backward_call(c10::intrusive_ptr<recorded_pass> pass,
                                                                       forward_tensors of, backward_call::tensors dy,
                                                                       wanted_gradients wants, std::string fault) {
  if (auto const device = pass->device)
    return device->make_backward_call(std::move(pass), std::move(of), std::move(dy), std::move(wants),
                                      std::move(fault));
  auto const element = pass->element, parameters = pass->parameters;
  return with_types(element, parameters, [&]<class Types>(Types) -> std::unique_ptr<backward_call> {
    return std::make_unique<typed_backward_call<typename Types::element, typename Types::parameter>>(
        std::move(pass), std::move(of), std::move(dy), std::move(wants), std::move(fault));
  });
}

/// Describes the pass. It borrows the pass.
[[nodiscard]] inline batch_norm_pass plan_of(backward_call& call) {
  return with_types(call.pass()->element, call.pass()->parameters, [&]<class Types>(Types) {
    return static_cast<typed_backward_call<typename Types::element, typename Types::parameter>&>(call).plan();
  });
}

} // namespace syncnorm::torch::detail
