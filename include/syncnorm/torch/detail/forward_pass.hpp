#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/types.h>

#include <syncnorm/core/detail/overlap.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/in_place_history.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch::detail {

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
    try {
      compute();
    } catch (...) {
      fail();
      throw;
    }
    after();
  }
  /// Describes a pass on a device, which it borrows; `plan_of` does one on the CPU.
  [[nodiscard]] virtual std::unique_ptr<device_plan> plan_on_device() { return nullptr; }
  /// A pass that was described completes between these two. Throws where an input was written to since.
  virtual void before() {
    if (versions_ != versions_of(in_.batches))
      throw invalid_argument_error{"batch_norm forward: the input was written to before the pass was finished"};
    if (residual_versions_ != versions_of(residuals()))
      throw invalid_argument_error{"batch_norm forward: the residual was written to before the pass was finished"};
  }
  virtual void after() { tell_of_writing(); }
  /// In place of after() where a pass that was begun throws: once all ranks had been heard of, parts of the input may have been written.
  virtual void fail() noexcept {
    if (pass_->saved.count > 0) tell_of_writing();
  }

  [[nodiscard]] forward_inputs const& inputs() const noexcept { return in_; }
  [[nodiscard]] c10::intrusive_ptr<recorded_pass> const& pass() const noexcept { return pass_; }
  /// What autograd is to save so that the memory of the pass stays; undefined where it has none.
  [[nodiscard]] at::Tensor const& saved_memory() const noexcept { return saved_memory_; }
  /// One of each micro-batch; none where a fault of this rank leaves nothing to record.
  [[nodiscard]] std::vector<at::Tensor> const& outputs() const noexcept { return outputs_; }
  /// What autograd is to record as outputs: in place not the inputs themselves.
  [[nodiscard]] std::vector<at::Tensor> recorded_outputs() const {
    auto recorded = outputs_;
    for (std::size_t k = 0; k < recorded.size(); ++k)
      if (is_input(k)) recorded[k] = recorded[k].detach();
    return recorded;
  }
  /// The output of micro-batch k, given it as autograd has recorded it, if it has.
  [[nodiscard]] at::Tensor returned(at::Tensor const& recorded, std::size_t k) const {
    return is_input(k) ? with_history_of(recorded, in_.batches[k]) : recorded;
  }
  /// Whether gradients are recorded.
  [[nodiscard]] bool records() const noexcept { return backward_ != backward_pass::impossible; }

protected:
  forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters, std::string fault,
               backward_pass backward)
      : in_{std::move(in)}, fault_{std::move(fault)}, backward_{backward}, pass_{c10::make_intrusive<recorded_pass>()},
        versions_{versions_of(in_.batches)}, residual_versions_{versions_of(residuals())} {
    pass_->state = in_.state;
    pass_->element = element;
    pass_->parameters = parameters;
    pass_->channels = in_.channels;
    bool has_mask = false;
    for (auto const& with : in_.epilogues) {
      pass_->epilogues.push_back({with.activation, with.masked});
      has_mask = has_mask || with.mask.defined();
    }
    if (!has_mask && !in_.in_place) return;
    memory_ = std::make_shared<pass_memory>();
    memory_->masks.resize(in_.epilogues.size());
    saved_memory_ = tensor_with(memory_);
    pass_->memory = memory_;
    pass_->has_memory = true;
  }

  virtual void compute() = 0;

  forward_inputs in_;
  std::string fault_;
  backward_pass backward_; ///< what this rank needs or lacks
  c10::intrusive_ptr<recorded_pass> pass_;
  std::shared_ptr<pass_memory> memory_; ///< null: there are no masks, and it is not in place
  std::vector<at::Tensor> outputs_;

private:
  [[nodiscard]] bool is_input(std::size_t k) const { return outputs_[k].is_same(in_.batches[k]); }
  /// Tells autograd that a pass in place has written to its inputs.
  void tell_of_writing() const {
    for (std::size_t k = 0; k < outputs_.size(); ++k)
      if (is_input(k)) bump_versions({in_.batches[k]});
  }
  [[nodiscard]] std::vector<at::Tensor> residuals() const {
    std::vector<at::Tensor> residuals;
    for (auto const& with : in_.epilogues) residuals.push_back(with.residual);
    return residuals;
  }
  [[nodiscard]] static std::vector<std::int64_t> versions_of(std::vector<at::Tensor> const& tensors) {
    std::vector<std::int64_t> versions;
    for (auto const& tensor : tensors)
      versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
    return versions;
  }

  std::vector<std::int64_t> versions_, residual_versions_;
  at::Tensor saved_memory_;
};

/// The same for elements of type `T` and parameters of type `P`: what a pass reads and writes, wherever it runs.
template <class T, class P>
class prepared_forward_pass : public forward_pass {
protected:
  /// `fault` is what is wrong already.
  prepared_forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters, std::string fault,
                        backward_pass backward);

  /// Whether the pass counts in num_batches_tracked.
  [[nodiscard]] bool counts() const {
    return in_.scope == statistics_scope::all_ranks && mean_.defined() && in_.num_batches_tracked.defined();
  }

  std::vector<tensor_view<T const>> x_views_;
  std::vector<tensor_view<T>> y_views_;
  affine_parameters<P> affine_;
  running_statistics<P> running_;
  std::vector<batch_norm_epilogue<T>> epilogues_; ///< of each micro-batch
  at::Tensor mean_, var_;                         ///< the running statistics, wherever the module's go meanwhile

private:
  void take_parameters();
  void take();

  // All detached, so that their memory is here, wherever that of the user's tensors goes meanwhile.
  std::vector<operands<T>> of_;
  at::Tensor gamma_, beta_;
  std::vector<at::Tensor> residuals_; // those that there are, which may be copies
};

// What is defined within a class every source compiles, also where another one instantiates it; so these are not.

template <class T, class P>
prepared_forward_pass<T, P>::prepared_forward_pass(forward_inputs in, at::ScalarType element, at::ScalarType parameters,
                                                   std::string fault, backward_pass backward)
    : forward_pass{std::move(in), element, parameters, std::move(fault), backward} {
  // What ranks have to have in common, a rank has whatever else is wrong, lest that be taken for what is wrong.
  auto already = std::exchange(fault_, {});
  attempt(fault_, [&] { take_parameters(); });
  if (!already.empty()) fault_ = std::move(already);
  attempt(fault_, [&] { take(); });
}

template <class T, class P>
void prepared_forward_pass<T, P>::take_parameters() {
  if (in_.weight.defined()) affine_.gamma = values_of<P>(gamma_ = in_memory(in_.weight.detach()).contiguous());
  if (in_.bias.defined()) affine_.beta = values_of<P>(beta_ = in_memory(in_.bias.detach()).contiguous());
  if (in_.scope == statistics_scope::this_rank || !in_.running_mean.defined()) return;
  mean_ = in_.running_mean.detach(), var_ = in_.running_var.detach();
  running_ = {values_of<P>(mean_), values_of<P>(var_)};
}

template <class T, class P>
void prepared_forward_pass<T, P>::take() {
  for (std::size_t k = 0; k < in_.batches.size(); ++k) {
    auto const& input = in_.batches[k];
    if (in_.in_place) {
      at::AutoGradMode const recording{records()};
      // Where other ranks need gradients, this one records, too.
      ::torch::autograd::check_inplace(input,
                                       backward_ == backward_pass::needed || in_.scope == statistics_scope::all_ranks);
    }
    auto const& of = of_.emplace_back(in_.in_place ? make_operands_in_place<T>(input) : make_operands<T>(input));
    x_views_.push_back(of.x_view);
    y_views_.push_back(of.y_view);
    outputs_.push_back(in_.in_place ? of.y : in_huge_pages(of.y));
    auto const& with = in_.epilogues[k];
    auto& epilogue = epilogues_.emplace_back();
    epilogue.activation = with.activation;
    epilogue.masked = with.masked;
    if (in_.in_place && may_overlap(input, with.residual)) // which the backward pass reads, too
      throw invalid_argument_error{"the residual is in the memory of the input, which a pass in place writes to"};
    if (with.residual.defined())
      epilogue.residual = make_companion<T>(residuals_.emplace_back(with.residual.detach()), of);
    if (with.mask.defined()) memory_->masks[k] = dense_mask(with.mask, of.order);
    epilogue.mask = mask_in(memory_, k);
  }
}

} // namespace syncnorm::torch::detail
