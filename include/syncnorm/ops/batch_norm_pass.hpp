#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_forward.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/backward_steps.hpp>
#include <syncnorm/ops/detail/forward_steps.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm {

namespace detail {

/// Steps, and what they borrow.
class planned_pass {
public:
  virtual ~planned_pass() = default;
  [[nodiscard]] virtual pass_steps& steps() = 0;
};

template <class T, class P>
class planned_forward final : public planned_pass, public in_kept_memory {
public:
  planned_forward(host::executor_ref exec, std::int64_t channels, forward_operands<T, P> const& in,
                  batch_norm_options const& options, batch_norm_saved& saved, batch_norm_caller const& caller)
      : x_(in.x.begin(), in.x.end()), y_(in.y.begin(), in.y.end()),
        epilogues_(in.epilogues.begin(), in.epilogues.end()),
        steps_{exec,  channels, {x_, y_, in.affine, in.running, in.scope, epilogues_}, options, saved, *buffers_.data(),
               caller} {}
  pass_steps& steps() override { return steps_; }

private:
  kept_vector<tensor_view<T const>> x_;
  kept_vector<tensor_view<T>> y_;
  kept_vector<batch_norm_epilogue<T>> epilogues_;
  host::detail::scratch_lease<pass_buffers> buffers_{1};
  forward_steps<T, P> steps_;
};

template <class T, class P>
class planned_backward final : public planned_pass, public in_kept_memory {
public:
  planned_backward(host::executor_ref exec, std::int64_t channels, backward_operands<T, P> const& in,
                   batch_norm_saved const& saved, bool exchange, batch_norm_caller const& caller)
      : dy_(in.dy.begin(), in.dy.end()), x_(in.x.begin(), in.x.end()), dx_(in.dx.begin(), in.dx.end()),
        dresidual_(in.dresidual.begin(), in.dresidual.end()), epilogues_(in.epilogues.begin(), in.epilogues.end()),
        steps_{exec,  channels, {dy_, x_, dx_, in.affine, in.gradients, epilogues_, dresidual_},
               saved, exchange, *buffers_.data(),
               caller} {}
  pass_steps& steps() override { return steps_; }

private:
  kept_vector<tensor_view<T const>> dy_, x_;
  kept_vector<tensor_view<T>> dx_, dresidual_;
  kept_vector<batch_norm_epilogue<T>> epilogues_;
  host::detail::scratch_lease<pass_buffers> buffers_{1};
  backward_steps<T, P> steps_;
};

/// A forward pass by constant statistics, which takes part in no exchange.
template <class T, class P>
class planned_inference final : public planned_pass, public in_kept_memory, private local_pass_steps {
public:
  planned_inference(host::executor_ref exec, std::int64_t channels, forward_operands<T, P> const& in,
                    batch_norm_options const& options, batch_norm_saved& saved, batch_norm_caller const& caller = {})
      : exec_{exec}, channels_{channels}, x_(in.x.begin(), in.x.end()), y_(in.y.begin(), in.y.end()),
        epilogues_(in.epilogues.begin(), in.epilogues.end()), affine_{in.affine}, running_{in.running},
        options_{options}, saved_{&saved} {
    check_.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
    check_.channel_values(in.running.mean, "running_mean", channels);
    check_inference(check_, operands());
  }
  pass_steps& steps() override { return *this; }

private:
  using operands_type = inference_operands<T, P>;

  [[nodiscard]] std::int64_t channels() const override { return channels_; }
  [[nodiscard]] packet_header header() const override {
    return make_header<T>(operands_type::name, channels_, 0, options_.exchange, check_);
  }
  [[nodiscard]] batch_norm_saved const* saves_to() const override { return saved_; }
  void fail() override { forget(*saved_, statistics_scope::constant); }
  void require_valid() const override { throw_fault(operands_type::name, check_); }
  void run_alone() override { infer(exec_, operands(), *saved_); }

  [[nodiscard]] operands_type operands() const {
    return {x_, y_, affine_, running_.mean, running_.var, options_.eps, options_.variance, epilogues_};
  }

  host::executor_ref exec_;
  std::int64_t channels_;
  kept_vector<tensor_view<T const>> x_;
  kept_vector<tensor_view<T>> y_;
  kept_vector<batch_norm_epilogue<T>> epilogues_;
  affine_parameters<P> affine_;
  running_statistics<P> running_;
  batch_norm_options options_;
  batch_norm_saved* saved_;
  call_check check_;
};

} // namespace detail

/// A pass of one layer that has been described, but not begun. It borrows the executor, the tensors, the layer's state and `saved`.
class batch_norm_pass {
public:
  explicit batch_norm_pass(std::unique_ptr<detail::planned_pass> planned) : planned_{std::move(planned)} {}

  [[nodiscard]] detail::pass_steps& steps() const { return planned_->steps(); }

private:
  std::unique_ptr<detail::planned_pass> planned_;
};

namespace detail {

/// f(); where it throws, nothing goes on from the passes.
template <class F>
auto or_fail(std::span<batch_norm_pass const> passes, F const& f) {
  try {
    return f();
  } catch (...) {
    for (auto const& pass : passes) pass.steps().fail();
    throw;
  }
}

} // namespace detail

/// Runs passes on this rank alone; where one is wrong or fails, which is thrown, no layer changes.
inline void run_alone(std::span<batch_norm_pass const> passes) {
  detail::or_fail(passes, [&] {
    for (auto const& pass : passes) pass.steps().require_valid();
    for (auto const& pass : passes) pass.steps().run_alone();
  });
  for (auto const& pass : passes) pass.steps().commit_alone();
}

/// Describes `batch_norm_backward_batches`.
template <class T, class P = accumulate_t<T>>
[[nodiscard]] batch_norm_pass
plan_batch_norm_backward(host::executor_ref exec, std::int64_t channels, std::span<tensor_view<T const> const> dy,
                         std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> dx,
                         affine_parameters<P> affine, batch_norm_saved const& saved, affine_gradients<P> gradients,
                         batch_norm_backward_options const& options, batch_norm_caller const& caller = {},
                         std::span<batch_norm_epilogue<T> const> epilogues = {},
                         std::span<tensor_view<T> const> dresidual = {}) {
  detail::backward_operands<T, P> const operands{dy, x, dx, affine, gradients, epilogues, dresidual};
  return batch_norm_pass{
      std::make_unique<detail::planned_backward<T, P>>(exec, channels, operands, saved, options.exchange, caller)};
}

} // namespace syncnorm
