#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_in_place.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_backward.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_double_backward.hpp>
#include <syncnorm/ops/detail/cuda_batch_norm_forward.hpp>
#include <syncnorm/ops/detail/cuda_layer.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/ops/detail/cuda_pass.hpp>

namespace syncnorm::cuda {

/// A batch normalization layer on a GPU, as `syncnorm::batch_norm` is on the host. It owns the parameters (`P`, gamma = 1,
/// beta = 0), their gradients, the running statistics (mean 0, var 1), their counter, and a workspace for tensors of any
/// extents, all in memory of the device that was current at its making. `Kernels` launches its kernels: `gpu_kernels` or
/// `compiled_kernels`.
///
/// A pass enqueues its kernels on the stream, and with several ranks one allgather, or, as `exchange_policy` says, allreduces beside
/// one of headers. It allocates nothing and does not wait for the device, so it can be captured in a graph and replayed, given that
/// the communicator's collectives can be. Before the first pass, ranks agree on channels and options once: `prepare`, which waits for
/// the stream, or the first forward pass. Without `prepare`, CUDA may load a kernel at its first launch, and then that waits for
/// the device. A backward pass is of the mode of the forward pass that was enqueued before it, also where a graph has it. Use one stream
/// at a time.
///
/// Errors. With one rank, and for passes that exchange nothing, what is wrong is thrown at once. With several, the rank whose
/// fault it is joins the exchange, no rank writes anything in this pass, and every rank throws the same, naming the rank, from
/// a later call on the layer, or from `synchronize` and, if it is known by then, `check`. So do passes that were replayed. Calls
/// on the layer throw after they have joined their own exchange; since each rank hears of it in its own time, call
/// `synchronize` where all ranks are to hear of it at the same place. Parameters, gradients, running statistics and the
/// counter are as they were before the pass that failed. What CUDA refuses, as a kernel that the device has no code for, is thrown on that
/// rank at once, after it has joined.
template <mutable_element T, communicator C, class P, class Kernels>
class basic_batch_norm : public detail::device_layer<C> {
  using base = detail::device_layer<C>;

public:
  /// Local. Throws cuda_error where memory cannot be had, and communicator_error where `comm` has no ranks; else checks nothing.
  explicit basic_batch_norm(C comm, std::int64_t channels, batch_norm_layer_options const& options = {})
      : base{std::move(comm), channels, channels, options, current_limits()} {
    base::allocate([&](detail::memory_cutter& cutter) { cut(cutter); });
    (void)kept_of(1);
    base::fill(gamma_, from_double<P>(1));
    base::fill(running_var_, from_double<P>(1));
  }

  /// Loads the kernels of forward and backward passes, lets the ranks agree, and runs each collective of these passes once, in the first
  /// of which NCCL connects ranks. Collective, waits for the stream; not for a stream that is being captured. Of double backward
  /// passes, and of those in two phases and in groups, run one each before they are captured.
  void prepare(cudaStream_t stream) {
    base::prepare_passes(
        stream, [] { kernels_of<T, Kernels>::load_kernels(); },
        [&](detail::device_check& check) {
          check.options(options_.norm, running(), channels_);
          return syncnorm::detail::make_forward_header<T>(channels_, 0, affine(), running(), options_.norm, check);
        });
  }

  /// y = batch_norm(x), `[N, C, S]` in device memory; as on the host.
  void forward(tensor_view<T const> x, tensor_view<T> y, cudaStream_t stream) { forward(x, y, {}, stream); }
  void forward(tensor_view<T const> x, tensor_view<T> y, batch_norm_epilogue<T> const& epilogue, cudaStream_t stream) {
    run_forward({&x, 1}, {&y, 1}, {&epilogue, 1}, {}, stream);
  }

  /// dx for the latest forward pass, whose x this has to be; adds to the gradients of gamma and beta. A default `dx`: not
  /// needed. As on the host.
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx, cudaStream_t stream) {
    backward(x, dy, dx, {}, {}, {}, stream);
  }
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                batch_norm_backward_options const& options, cudaStream_t stream) {
    backward(x, dy, dx, {}, {}, options, stream);
  }
  /// The same after a forward pass with an epilogue, which this has to be.
  void backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                batch_norm_epilogue<T> const& epilogue, tensor_view<T> dresidual,
                batch_norm_backward_options const& options, cudaStream_t stream) {
    backward({&x, 1}, {&dy, 1}, {&dx, 1}, {&epilogue, 1}, {&dresidual, 1}, options, stream);
  }

  /// `forward` over x itself, of which `backward_in_place` needs no copy: it recovers x from y, up to rounding, where gamma,
  /// beta and the activation allow it, and keeps the other channels. The first one for as large a tensor makes room for those,
  /// and for a sixteenth of all besides, as gamma and beta move: for that it waits for the stream. Where that is not enough, it is an
  /// error on every rank, and x stays: then, and before a first pass is captured in a graph, call `reserve_in_place`.
  /// The residual has to stay until `backward_in_place`, and should not be far larger than gamma, `recoverable_ratio`.
  void forward_in_place(tensor_view<T> x, batch_norm_epilogue<T> const& epilogue, cudaStream_t stream) {
    forward_in_place({&x, 1}, {&epilogue, 1}, stream);
  }
  void forward_in_place(tensor_view<T> x, cudaStream_t stream) { forward_in_place(x, {}, stream); }
  /// The same of K micro-batches by one statistic, none of which may be in the memory of another one or of its residual. There is
  /// room for each, or it is an error and every one stays.
  void forward_in_place(std::span<tensor_view<T> const> x, std::span<batch_norm_epilogue<T> const> epilogues,
                        cudaStream_t stream) {
    auto const read = read_only(x);
    auto const kept = kept_of(x.size());
    in_place_.batches = x.size();
    try {
      run_forward(read, x, epilogues, kept, stream);
    } catch (...) {
      in_place_.pass = saved_.passes;
      throw;
    }
    in_place_.pass = saved_.passes;
  }

  /// `backward` after `forward_in_place`, whose y this is, with gamma and beta as they were; x is in its memory afterwards,
  /// if a position of some rank counts, but not in channels where inv_std is 0, nor elements whose y was not finite. dx may be y or dy.
  void backward_in_place(tensor_view<T> y, tensor_view<T const> dy, tensor_view<T> dx,
                         batch_norm_epilogue<T> const& epilogue, tensor_view<T> dresidual,
                         batch_norm_backward_options const& options, cudaStream_t stream) {
    backward_in_place({&y, 1}, {&dy, 1}, {&dx, 1}, {&epilogue, 1}, {&dresidual, 1}, options, stream);
  }
  void backward_in_place(tensor_view<T> y, tensor_view<T const> dy, tensor_view<T> dx, cudaStream_t stream) {
    backward_in_place(y, dy, dx, {}, {}, {}, stream);
  }
  /// The same of the K micro-batches of the latest `forward_in_place`. No dx or dresidual: not needed.
  void backward_in_place(std::span<tensor_view<T> const> y, std::span<tensor_view<T const> const> dy,
                         std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues,
                         std::span<tensor_view<T> const> dresidual, batch_norm_backward_options const& options,
                         cudaStream_t stream) {
    std::string_view const fault =
        in_place_.pass == saved_.passes ? "" : "the latest forward pass was not in place, or failed";
    detail::backward_operands<T, P> const in{
        dy, read_only(y), dx, affine(), {gamma_grad_, beta_grad_}, epilogues, dresidual, kept_of(in_place_.batches), y};
    run_backward(in, options, stream, {.fault = fault});
  }

  /// Makes room for what passes in place keep of tensors as large as `x`, by gamma and beta as they are, and for `spare` channels
  /// more. Local; allocates, waits for the stream, and drops what is kept. Passes that a graph has go on with the room that they had,
  /// which the layer keeps.
  void reserve_in_place(tensor_view<T const> x, activation const& of, std::int64_t spare, cudaStream_t stream) {
    detail::device_scope const there{workspace_.device()};
    kept_of(1)[0].reserve(x.count(), affine(), of, spare, stream, waits());
  }
  /// The same for K micro-batches. Epilogues: none, or one for each; else throws invalid_argument_error.
  void reserve_in_place(std::span<tensor_view<T> const> x, std::span<batch_norm_epilogue<T> const> epilogues,
                        std::int64_t spare, cudaStream_t stream) {
    if (!epilogues.empty() && epilogues.size() != x.size())
      throw invalid_argument_error{"reserve_in_place: there is another number of epilogues than of micro-batches"};
    detail::device_scope const there{workspace_.device()};
    auto const kept = kept_of(x.size());
    for (std::size_t k = 0; k < x.size(); ++k)
      kept[k].reserve(x[k].count(), affine(), detail::of_batch(epilogues, k).activation, spare, stream, waits());
  }
  /// What the latest `forward_in_place` of more than `k` micro-batches has kept of the one of this number; of the first, nothing before
  /// any. Throws invalid_argument_error where there never was one of this number.
  [[nodiscard]] batch_norm_kept<T> const& kept(std::size_t k = 0) const {
    if (k >= kept_.size()) throw invalid_argument_error{"kept: there was no micro-batch " + std::to_string(k)};
    return kept_[k];
  }

  /// `forward` and `backward` of K micro-batches by one statistic, with one exchange, as on the host: `[N_k, C, S_k]` for each
  /// k < K, in which ranks may differ, K included. Epilogues: none, or one for each. No dx or dresidual: not needed.
  void forward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
               std::span<batch_norm_epilogue<T> const> epilogues, cudaStream_t stream) {
    run_forward(x, y, epilogues, {}, stream);
  }
  void backward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T const> const> dy,
                std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues,
                std::span<tensor_view<T> const> dresidual, batch_norm_backward_options const& options,
                cudaStream_t stream) {
    run_backward({dy, x, dx, affine(), {gamma_grad_, beta_grad_}, epilogues, dresidual}, options, stream);
  }

  /// `forward` up to the exchange, which goes on beside what the caller enqueues meanwhile; `finish` of what is returned completes
  /// it. Collective where `forward` is. The first one of as many that are pending at a time allocates, and again after a capture, since
  /// a graph keeps what its passes exchange.
  [[nodiscard]] pending_passes begin_forward(tensor_view<T const> x, tensor_view<T> y, cudaStream_t stream) {
    return begin_forward(x, y, {}, stream);
  }
  [[nodiscard]] pending_passes begin_forward(tensor_view<T const> x, tensor_view<T> y,
                                             batch_norm_epilogue<T> const& epilogue, cudaStream_t stream) {
    return base::begin(plan_forward(x, y, epilogue), stream);
  }
  /// `backward` in two phases.
  [[nodiscard]] pending_passes begin_backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                                              cudaStream_t stream) {
    return begin_backward(x, dy, dx, {}, {}, {}, stream);
  }
  [[nodiscard]] pending_passes begin_backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                                              batch_norm_epilogue<T> const& epilogue, tensor_view<T> dresidual,
                                              batch_norm_backward_options const& options, cudaStream_t stream) {
    return base::begin(plan_backward(x, dy, dx, epilogue, dresidual, options), stream);
  }

  /// `forward`, described for a `batch_norm_group`. The layer must stay where it is until the pass is finished.
  [[nodiscard]] batch_norm_pass plan_forward(tensor_view<T const> x, tensor_view<T> y,
                                             batch_norm_epilogue<T> const& epilogue = {}) {
    return plan_forward({&x, 1}, {&y, 1}, {&epilogue, 1});
  }
  [[nodiscard]] batch_norm_pass plan_forward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
                                             std::span<batch_norm_epilogue<T> const> epilogues = {}) {
    return batch_norm_pass{std::make_unique<detail::planned_forward<Kernels, T, P>>(
        forward_operands(x, y, epilogues, {}), options_.norm, saved_, workspace_)};
  }
  /// `backward`, described for a `batch_norm_group`.
  [[nodiscard]] batch_norm_pass plan_backward(tensor_view<T const> x, tensor_view<T const> dy, tensor_view<T> dx,
                                              batch_norm_epilogue<T> const& epilogue = {},
                                              tensor_view<T> dresidual = {},
                                              batch_norm_backward_options const& options = {}) {
    return plan_backward({&x, 1}, {&dy, 1}, {&dx, 1}, {&epilogue, 1}, {&dresidual, 1}, options);
  }
  [[nodiscard]] batch_norm_pass
  plan_backward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T const> const> dy,
                std::span<tensor_view<T> const> dx, std::span<batch_norm_epilogue<T> const> epilogues,
                std::span<tensor_view<T> const> dresidual, batch_norm_backward_options const& options = {}) {
    return batch_norm_pass{std::make_unique<detail::planned_backward<Kernels, T, P>>(
        detail::backward_operands<T, P>{dy, x, dx, affine(), {gamma_grad_, beta_grad_}, epilogues, dresidual},
        options.exchange, saved_, workspace_)};
  }

  /// The gradients of the latest backward pass, whose x, dy and epilogue these have to be; adds to the gradient of gamma. As
  /// `batch_norm_double_backward` on the host. The first one allocates, unless `reserve_double_backward` has.
  void double_backward(batch_norm_second_order<T, P> const& second, tensor_view<T const> x, tensor_view<T const> dy,
                       tensor_view<T> to_dy, tensor_view<T> to_x, batch_norm_epilogue<T> const& epilogue,
                       batch_norm_backward_options const& options, cudaStream_t stream) {
    run_double_backward({{&dy, 1},
                         {&x, 1},
                         {&second.dx, 1},
                         {&second.dresidual, 1},
                         second.gamma_gradient,
                         second.beta_gradient,
                         affine(),
                         {&to_dy, 1},
                         {&to_x, 1},
                         gamma_grad_,
                         {&epilogue, 1}},
                        options, stream);
  }
  /// `double_backward` of K micro-batches. No to_dy or to_x: not needed.
  void double_backward(batch_norm_second_order_batches<T, P> const& second, std::span<tensor_view<T const> const> x,
                       std::span<tensor_view<T const> const> dy, std::span<tensor_view<T> const> to_dy,
                       std::span<tensor_view<T> const> to_x, std::span<batch_norm_epilogue<T> const> epilogues,
                       batch_norm_backward_options const& options, cudaStream_t stream) {
    run_double_backward({dy, x, second.dx, second.dresidual, second.gamma_gradient, second.beta_gradient, affine(),
                         to_dy, to_x, gamma_grad_, epilogues},
                        options, stream);
  }
  /// Allocates what double backward passes exchange, seven numbers a channel and rank, and loads their kernels. Local; before a
  /// first double backward pass is captured in a graph.
  void reserve_double_backward() {
    base::reserve_double_backward([] { kernels_of<T, Kernels>::load_double_backward_kernels(); });
  }

  /// The running statistics as they were at first: mean 0, var 1, no batches tracked. Local; the same on every rank. Waits for the
  /// stream; not for one that is being captured.
  void reset_running_stats(cudaStream_t stream) {
    detail::device_scope const there{workspace_.device()};
    batch_norm_workspace::wait(comm_, stream);
    base::fill(running_mean_, from_double<P>(0));
    base::fill(running_var_, from_double<P>(1));
    base::reset_counter();
  }

  void zero_grad(cudaStream_t stream) {
    for (auto const gradient : {gamma_grad_, beta_grad_}) base::zero(gradient, stream);
  }

  /// `[C]` each, in device memory; empty where the layer has no such parameters.
  [[nodiscard]] std::span<P> gamma() noexcept { return gamma_; }
  [[nodiscard]] std::span<P const> gamma() const noexcept { return gamma_; }
  [[nodiscard]] std::span<P> beta() noexcept { return beta_; }
  [[nodiscard]] std::span<P const> beta() const noexcept { return beta_; }
  [[nodiscard]] std::span<P> gamma_grad() noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P const> gamma_grad() const noexcept { return gamma_grad_; }
  [[nodiscard]] std::span<P> beta_grad() noexcept { return beta_grad_; }
  [[nodiscard]] std::span<P const> beta_grad() const noexcept { return beta_grad_; }
  /// `[C]` each, in device memory; empty without running statistics.
  [[nodiscard]] std::span<P> running_mean() noexcept { return running_mean_; }
  [[nodiscard]] std::span<P const> running_mean() const noexcept { return running_mean_; }
  [[nodiscard]] std::span<P> running_var() noexcept { return running_var_; }
  [[nodiscard]] std::span<P const> running_var() const noexcept { return running_var_; }

private:
  void cut(detail::memory_cutter& cutter) {
    auto const c = base::channel_count();
    auto const take = [&](std::span<P>& values, bool exists) {
      if (exists) values = {cutter.take<P>(c), c};
    };
    take(gamma_, base::has_gamma());
    take(gamma_grad_, base::has_gamma());
    take(beta_, base::has_beta());
    take(beta_grad_, base::has_beta());
    take(running_mean_, options_.track_running_stats);
    take(running_var_, options_.track_running_stats);
  }

  [[nodiscard]] detail::forward_operands<T, P> forward_operands(std::span<tensor_view<T const> const> x,
                                                                std::span<tensor_view<T> const> y,
                                                                std::span<batch_norm_epilogue<T> const> epilogues,
                                                                std::span<batch_norm_kept<T>> kept) const {
    return {x, y, affine(), running(), base::scope_of_forward(), epilogues, kept};
  }
  void run_forward(std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> y,
                   std::span<batch_norm_epilogue<T> const> epilogues, std::span<batch_norm_kept<T>> kept,
                   cudaStream_t stream) {
    auto const wait = waits();
    auto in = forward_operands(x, y, epilogues, kept);
    in.wait = wait;
    detail::forward<Kernels, T, P>(comm_, in, options_.norm, saved_, workspace_, stream);
  }
  /// Waits for a stream, no longer than the communicator lets it.
  [[nodiscard]] auto waits() const {
    return [this](cudaStream_t stream) { batch_norm_workspace::wait(comm_, stream); };
  }
  void run_backward(detail::backward_operands<T, P> const& in, batch_norm_backward_options const& options,
                    cudaStream_t stream, batch_norm_caller const& caller = {}) {
    detail::backward<Kernels, T, P>(comm_, in, options, saved_, workspace_, stream, caller);
  }

  /// What is kept of each of K micro-batches.
  [[nodiscard]] std::span<batch_norm_kept<T>> kept_of(std::size_t batches) {
    while (kept_.size() < batches) kept_.emplace_back(channels_);
    return std::span{kept_}.first(batches);
  }
  /// Views of what is written, to be read in this pass.
  [[nodiscard]] std::span<tensor_view<T const> const> read_only(std::span<tensor_view<T> const> of) {
    views_.assign(of.begin(), of.end());
    return views_;
  }

  void run_double_backward(syncnorm::detail::double_backward_operands<T, P> const& in,
                           batch_norm_backward_options const& options, cudaStream_t stream) {
    detail::double_backward<Kernels, T, P>(comm_, in, options, saved_, workspace_, stream);
  }

  [[nodiscard]] affine_parameters<P> affine() const { return {gamma_, beta_}; }
  [[nodiscard]] running_statistics<P> running() const {
    if (!options_.track_running_stats) return {};
    return {running_mean_, running_var_, num_batches_tracked_};
  }

  using base::comm_, base::options_, base::channels_, base::num_batches_tracked_, base::saved_, base::workspace_;
  std::span<P> gamma_, beta_, gamma_grad_, beta_grad_, running_mean_, running_var_;
  std::vector<batch_norm_kept<T>> kept_; // of as many micro-batches as there were, of one at least
  /// Of the latest forward pass in place: `saved_.passes` after it, and how many micro-batches it had.
  struct {
    std::int64_t pass = -1;
    std::size_t batches = 1;
  } in_place_;
  std::vector<tensor_view<T const>> views_;
};

} // namespace syncnorm::cuda
