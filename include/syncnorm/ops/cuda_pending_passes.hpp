#pragma once

#include <cstddef>
#include <exception>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_backward.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_forward.hpp>
#include <syncnorm/ops/detail/cuda_packets.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>
#include <syncnorm/ops/detail/cuda_report.hpp>
#include <syncnorm/ops/detail/digest.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::cuda {

namespace detail {

/// A pass, and what it borrows.
class planned_pass {
public:
  virtual ~planned_pass() = default;
  [[nodiscard]] virtual groupable_pass& steps() = 0;
};

template <class T>
[[nodiscard]] std::vector<T> copy_of(std::span<T const> values) {
  return {values.begin(), values.end()};
}

template <class Kernels, class T, class P>
class planned_forward final : public planned_pass {
public:
  planned_forward(forward_operands<T, P> const& in, batch_norm_options const& options, batch_norm_saved& saved,
                  batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : x_{copy_of(in.x)}, y_{copy_of(in.y)}, epilogues_{copy_of(in.epilogues)},
        steps_{{x_, y_, in.affine, in.running, in.scope, epilogues_, in.kept}, options, saved, workspace, caller} {}
  groupable_pass& steps() override { return steps_; }

private:
  std::vector<tensor_view<T const>> x_;
  std::vector<tensor_view<T>> y_;
  std::vector<batch_norm_epilogue<T>> epilogues_;
  forward_pass<Kernels, T, P> steps_;
};

template <class Kernels, class T, class P>
class planned_backward final : public planned_pass {
public:
  planned_backward(backward_operands<T, P> const& in, bool exchange, batch_norm_saved const& saved,
                   batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : dy_{copy_of(in.dy)}, x_{copy_of(in.x)}, y_{copy_of(in.y)}, dx_{copy_of(in.dx)},
        dresidual_{copy_of(in.dresidual)}, epilogues_{copy_of(in.epilogues)}, steps_{own_operands(in), exchange, saved,
                                                                                     workspace, caller} {}
  groupable_pass& steps() override { return steps_; }

private:
  [[nodiscard]] backward_operands<T, P> own_operands(backward_operands<T, P> in) const {
    in.dy = dy_, in.x = x_, in.y = y_, in.dx = dx_, in.dresidual = dresidual_, in.epilogues = epilogues_;
    return in;
  }

  std::vector<tensor_view<T const>> dy_, x_;
  std::vector<tensor_view<T>> y_, dx_, dresidual_;
  std::vector<batch_norm_epilogue<T>> epilogues_;
  backward_pass<Kernels, T, P> steps_;
};

} // namespace detail

/// A pass of one layer that has been described, but not begun. It borrows the tensors and the layer.
class batch_norm_pass {
public:
  explicit batch_norm_pass(std::unique_ptr<detail::planned_pass> planned) : planned_{std::move(planned)} {}

  [[nodiscard]] detail::groupable_pass& steps() const { return planned_->steps(); }

private:
  std::unique_ptr<detail::planned_pass> planned_;
};

/// Passes whose exchange goes on on a stream of its own, beside what the caller enqueues meanwhile. Whatever it borrows, the layers
/// above all, has to stay where it is until then; the tensors as long as what was enqueued is not done. The exchange policy is that of
/// the first pass.
///
/// `begin` has started the collective, `finish` starts none: so any number of them may be pending over a communicator, and each
/// rank may finish them in an order of its own, but several forward passes of one layer, each of which moves its running
/// statistics, in the same as the others. No other forward pass of a layer may come between `begin` and `finish` of its backward pass,
/// which then throws, on the ranks where it did. Destruction without `finish` lets the stream that it was begun on wait for the
/// exchange, and drops what comes: on this rank nothing else has changed but that there is no forward pass, as on the host.
class pending_passes {
public:
  pending_passes(pending_passes&& other) noexcept { swap(other); }
  pending_passes& operator=(pending_passes&& other) noexcept {
    pending_passes taken{std::move(other)};
    swap(taken);
    return *this;
  }
  ~pending_passes() {
    if (!done_) drop();
    if (buffers_ == nullptr) return;
    (void)buffers_->side.join(stream_);
    buffers_->in_use = false;
  }

  /// Whether the exchange is done. Not while the stream is being captured.
  [[nodiscard]] bool ready() const { return buffers_ == nullptr || buffers_->side.is_done(); }

  /// Enqueues what completes the passes, after the exchange. Not collective, and does not wait for the device. What is wrong on some
  /// rank comes up as after a pass in one phase: in a later call, or where the layer or group is synchronized; with one rank at
  /// once. Then nothing was written, except by layers that exchange nothing, which with one rank is all of them: of what the device
  /// alone finds wrong, that a mask leaves one value per channel, the others do not hear. Once.
  void finish(cudaStream_t stream) {
    if (done_) throw invalid_argument_error{"finish: these passes are finished already"};
    done_ = true;
    try {
      complete(stream);
    } catch (...) {
      drop();
      throw;
    }
    if (auto* const buffers = std::exchange(buffers_, nullptr)) buffers->in_use = false;
    if (report_ != nullptr) report_->raise();
    for (auto const& pass : passes_) pass.steps().workspace().raise();
  }

  /// Begins passes of one kind, forward or backward, over `comm`: one collective for all of them, with buffers of `pool`.
  /// `agreed`: whether the ranks have agreed on layers of these channels, for which it else waits for the stream.
  template <communicator C>
  [[nodiscard]] static pending_passes begin(C const& comm, std::span<batch_norm_pass> passes, detail::packet_pool& pool,
                                            detail::pass_report& report, bool& agreed, cudaStream_t stream,
                                            syncnorm::detail::pass_form form = syncnorm::detail::pass_form::in_group) {
    pending_passes pending;
    pending.passes_.assign(std::make_move_iterator(passes.begin()), std::make_move_iterator(passes.end()));
    pending.report_ = &report;
    pending.stream_ = stream;
    std::exception_ptr failure;
    bool exchanged = false;
    try {
      failure = pending.start(comm, pool, agreed, exchanged, form);
    } catch (...) {
      exchanged ? pending.drop() : pending.fail();
      throw;
    }
    pending.done_ = failure != nullptr;
    if (failure != nullptr) std::rethrow_exception(failure);
    return pending;
  }

private:
  pending_passes() = default;

  void swap(pending_passes& other) noexcept {
    std::swap(passes_, other.passes_);
    std::swap(buffers_, other.buffers_);
    std::swap(report_, other.report_);
    std::swap(stream_, other.stream_);
    std::swap(done_, other.done_);
  }

  void fail() const noexcept {
    for (auto const& pass : passes_) pass.steps().fail();
  }
  void drop() const noexcept {
    for (auto const& pass : passes_) pass.steps().drop();
  }

  void complete(cudaStream_t stream) {
    if (buffers_ == nullptr)
      throw_faults();
    else
      syncnorm::detail::require_cuda(buffers_->side.join(stream), "cudaStreamWaitEvent");
    for (auto const& pass : passes_) pass.steps().require_current();
    bool const reduces = buffers_ != nullptr && !buffers_->packets.gathers();
    bool const together = buffers_ != nullptr && (passes_.size() > 1 || reduces);
    std::optional<detail::device_scope> there;
    if (buffers_ != nullptr) there.emplace(passes_.front().steps().workspace().device());
    auto const run = [&](cudaStream_t on) {
      if (together) passes_[0].steps().agree_on_group(buffers_->packets.headers(reduces), report_->on_device(), on);
      for (std::size_t l = 0; l < passes_.size(); ++l) {
        auto& steps = passes_[l].steps();
        if (buffers_ != nullptr && steps.collective())
          steps.apply(reduces ? buffers_->packets.merged(l) : buffers_->packets.gathered(l),
                      buffers_->packets.place(l, reduces, false),
                      together && !reduces ? fault_report{} : report_->on_device(), on);
        else if (steps.fault().empty())
          steps.run_alone(on);
      }
    };
    if (buffers_ == nullptr) {
      run(stream);
    } else {
      auto& workspace = passes_.front().steps().workspace();
      int device_of_stream = workspace.device();
      syncnorm::detail::require_cuda(detail::ask_device(stream, device_of_stream), "cudaStreamGetDevice");
      workspace.on_own_device(stream, device_of_stream, run);
    }
  }

  /// Why pass l cannot be in a group with those before it; empty: it can.
  [[nodiscard]] std::string_view clash_of(std::size_t l) const {
    auto const& steps = passes_[l].steps();
    for (auto const& before : std::span{passes_}.first(l))
      if (steps.saves_to() != nullptr && before.steps().saves_to() == steps.saves_to())
        return "two forward passes of one group are of the same layer";
    if (steps.rule() != passes_.front().steps().rule()) return "a forward and a backward pass cannot travel together";
    return {};
  }

  /// Of passes that exchange nothing.
  void throw_faults() const {
    for (std::size_t l = 0; l < passes_.size(); ++l) {
      auto const& steps = passes_[l].steps();
      detail::throw_fault(steps);
      if (auto const clash = clash_of(l); steps.collective() && !clash.empty())
        throw invalid_argument_error{std::string{steps.name()} + ": " + std::string{clash}};
    }
  }

  /// Returns what is to be thrown of passes of which all ranks hear. `exchanged`: whether the others may have begun them.
  template <class C>
  [[nodiscard]] std::exception_ptr start(C const& comm, detail::packet_pool& pool, bool& agreed, bool& exchanged,
                                         syncnorm::detail::pass_form form) {
    bool exchanges = false;
    for (auto const& pass : passes_) exchanges |= syncnorm::size(comm) > 1 && pass.steps().collective();
    if (exchanges) detail::require_capturable(comm, passes_.front().steps().name(), agreed, stream_);
    for (auto const& pass : passes_) pass.steps().check(!exchanges || !pass.steps().collective(), stream_);
    if (!exchanges) return nullptr;
    detail::device_scope const there{passes_.front().steps().workspace().device()};

    std::vector<syncnorm::detail::packet_header> headers;
    auto& first = passes_.front().steps();
    bool const moments = first.rule() == detail::merge_rule::moments;
    auto const channels = std::accumulate(pool.channels().begin(), pool.channels().end(), std::int64_t{0});
    auto const policy = detail::resolve_on_stream(syncnorm::detail::policy_asked(first.header()), comm, first.rule(),
                                                  channels, 2, passes_.size());
    bool const reduces = policy == exchange_policy::reduce;
    for (auto const& pass : passes_) {
      auto& header = headers.emplace_back(pass.steps().header());
      header.layers = static_cast<std::int16_t>(passes_.size());
      header.form = pass.steps().collective() ? form : syncnorm::detail::pass_form::in_group_alone;
      header.policy = static_cast<std::int16_t>(policy);
      header.shape = passes_.size() == 1 ? 0 : syncnorm::detail::shape_digest(pool.channels());
      if (auto const clash = clash_of(headers.size() - 1); !clash.empty())
        syncnorm::detail::set_text(header.fault, clash);
    }
    std::exception_ptr failure;
    first.workspace().on_own_device(stream_, first.stream_device(), [&](cudaStream_t on) {
      if (!agreed) {
        auto head = headers.front(); // of faults all hear with the packets
        head.fault = {};
        first.workspace().agree(comm, head, on);
        agreed = true;
      }
      auto& buffers = pool.take(!reduces, on);
      buffers.in_use = true;
      buffers_ = &buffers;
      for (std::size_t l = 0; l < passes_.size(); ++l) {
        auto& steps = passes_[l].steps();
        auto const own = buffers.packets.place(l, reduces, moments);
        auto const thrown = detail::thrown_by_writing(headers[l], own, on, [&] {
          steps.collective() ? steps.local(headers[l], own, on) : steps.announce(headers[l], own, on);
        });
        if (failure == nullptr) failure = thrown;
      }
      buffers.side.run_after(on, [&](cudaStream_t side) {
        exchanged = true;
        if (failure == nullptr)
          detail::exchange(comm, first, buffers.packets, policy, {}, side); // whose faults `finish` reports
        else
          detail::rehearse_exchange(comm, buffers.packets, first.rule(), policy, side);
      });
      if (failure == nullptr) return;
      report_->tell(moments);
      for (auto const& pass : passes_) pass.steps().collective() ? pass.steps().forgo(on) : pass.steps().fail();
    });
    return failure;
  }

  std::vector<batch_norm_pass> passes_;
  detail::packet_buffers* buffers_ = nullptr;
  detail::pass_report* report_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool done_ = true; ///< also of what was moved from
};

} // namespace syncnorm::cuda
