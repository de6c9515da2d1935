#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/double_backward_buffers.hpp>
#include <syncnorm/ops/detail/exchange.hpp>
#include <syncnorm/ops/detail/packet_exchange.hpp>
#include <syncnorm/ops/detail/pass_buffers.hpp>

namespace syncnorm {

/// Where the statistics of a forward pass came from, and hence what its backward pass has to do.
enum class statistics_scope : std::uint8_t {
  all_ranks, ///< the batch over all ranks: the backward pass exchanges
  this_rank, ///< this rank's batch alone: the backward pass does not exchange
  constant,  ///< the running statistics: they have no gradient
};

/// How a batch norm layer is made; the same on every rank.
struct batch_norm_layer_options {
  batch_norm_options norm{};
  bool affine = true;                                ///< gamma and beta exist and are learned
  bool track_running_stats = true;                   ///< off: inference, too, normalizes by its own batch, on this rank
  affine_parts parts = affine_parts::gamma_and_beta; ///< which of gamma and beta exist, where `affine`
};

/// What the caller of a pass knows and the pass cannot see. It joins the exchange.
struct batch_norm_caller {
  std::string_view fault{}; ///< what is wrong on this rank, which every rank then throws; empty: nothing
  /// Of the forward pass alone. Where a rank needs a backward pass that is impossible on another, every rank throws.
  backward_pass backward = backward_pass::possible;
};

/// What a backward pass is to do.
struct batch_norm_backward_options {
  /// Off: the sums are this rank's alone, as if the other ranks' gradients were zero, and the call is not collective;
  /// for the steps of a gradient accumulation but the last. The same on every rank.
  bool exchange = true;
};

/// The gradients of a loss with respect to what a backward pass gave: dx `[N, C, S]`, this rank's gradients of gamma and
/// beta `[C]`, and the gradient of the residual `[N, C, S]`. A default view and empty spans stand for 0.
template <class T, class P>
struct batch_norm_second_order {
  tensor_view<T const> dx{};
  std::span<P const> gamma_gradient{}, beta_gradient{};
  tensor_view<T const> dresidual{};
};

/// `batch_norm_second_order` of a backward pass over K micro-batches: of dx and dresidual none, or one for each.
template <class T, class P>
struct batch_norm_second_order_batches {
  std::span<tensor_view<T const> const> dx{};
  std::span<P const> gamma_gradient{}, beta_gradient{};
  std::span<tensor_view<T const> const> dresidual{};
};

/// What a forward pass leaves for its backward pass, besides x.
struct batch_norm_saved {
  statistics_scope scope = statistics_scope::all_ranks;
  std::int64_t count = 0;            ///< elements of a channel over the scope; 0 where the statistics are constant
  std::int64_t own_count = -1;       ///< N·S of this rank's x, that of all micro-batches; −1: of any x
  std::vector<double> mean, inv_std; ///< `[C]`, inv_std = 1/√(var + eps); the same bits on every rank
  exchange_policy exchange = exchange_policy::automatic; ///< of the forward pass, and hence of the backward pass
  batch_variance normalized_by = batch_variance::biased;
  bool backward_needed = false; ///< some rank needs a backward pass, which every rank then has to join
  std::int64_t passes = 0;      ///< forward passes of which this has been so far

  [[nodiscard]] normalized_count normalized() const noexcept { return {count, normalized_by}; }
};

namespace detail {

/// Leaves nothing for a backward pass, after a forward pass of this scope that failed. Then the backward pass throws; over all ranks by
/// an exchange, since the others may have completed the forward pass.
inline void forget(batch_norm_saved& saved, statistics_scope scope,
                   exchange_policy exchange = exchange_policy::automatic) {
  ++saved.passes;
  saved.scope = scope;
  saved.exchange = exchange;
  saved.mean.clear();
  saved.inv_std.clear();
}

/// What f does, a forward pass of this scope or its beginning; where it throws, forgets.
template <class F>
decltype(auto) or_forget(batch_norm_saved& saved, statistics_scope scope, exchange_policy exchange, F const& f) {
  try {
    return f();
  } catch (...) {
    forget(saved, scope, exchange);
    throw;
  }
}

} // namespace detail

/// Buffers of the passes of one layer, and its ranks' standing agreement on the number of channels, by which a pass
/// after the first is one collective. Use it on every rank for the same calls. Without one, each pass makes its own,
/// and is a first pass: one collective more where ranks reduce, or there are over 128 channels.
struct batch_norm_workspace {
  explicit batch_norm_workspace(std::int64_t channels, bool agreed = false)
      : exchange{channels, agreed}, packets{{channels}, 2, agreed}, double_packets{{channels}, 7, agreed} {}

  detail::channel_exchange exchange;
  detail::exchange_plan forward_plan, backward_plan;
  detail::packet_exchange packets;        // under the reduce policy, and of passes in two phases
  detail::packet_exchange double_packets; // of double backward passes
  detail::double_backward_buffers double_buffers;
  detail::pass_buffers buffers;
};

} // namespace syncnorm
