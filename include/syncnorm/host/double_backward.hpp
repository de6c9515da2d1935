#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/activation_gradient.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/combine.hpp>
#include <syncnorm/host/combine_gated.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// What a double backward pass over one batch reads and writes; formulae and names as in `batch_norm_double_backward`. Without
/// data, u and v are 0, and to_dy and to_x not needed.
template <class T>
struct second_order_operands {
  tensor_view<T const> dy, x, u, v;
  tensor_view<T> to_dy, to_x;
  std::span<double const> mean, inv_std;
  affine_values affine;
  prepared_epilogue<T> epilogue;

  [[nodiscard]] second_order_operands channel_range(std::int64_t first, std::int64_t length) const {
    auto part = *this;
    for (auto* const view : {&part.dy, &part.x, &part.u, &part.v}) *view = view->channel_range(first, length);
    for (auto* const view : {&part.to_dy, &part.to_x}) *view = view->channel_range(first, length);
    part.mean = detail::channels_of(mean, first, length);
    part.inv_std = detail::channels_of(inv_std, first, length);
    part.affine = affine.from(first);
    part.epilogue = epilogue.channel_range(first, length);
    return part;
  }
};

/// Sums of a batch's channels, `[C]` each: Σ g, Σ g·(x − mean), Σ m·u, Σ m·u·(x − mean) and Σ u·g.
struct second_order_sums {
  std::span<double> g, g_xmu, u, u_xmu, u_g;

  [[nodiscard]] second_order_sums channel_range(std::int64_t first, std::int64_t length) const {
    auto part = *this;
    for (auto* const sums : {&part.g, &part.g_xmu, &part.u, &part.u_xmu, &part.u_g})
      *sums = detail::channels_of(*sums, first, length);
    return part;
  }
};

namespace detail {

/// g of some channels: dy itself, or made where the gradient to dy goes later, or in memory of the thread's own.
template <class T>
class activated_gradient {
public:
  activated_gradient(executor_ref exec, second_order_operands<T> const& of, bool is_made) : view_{of.dy} {
    if (!of.epilogue.gates()) return;
    tensor_view<T> out = of.to_dy;
    if (out.data == nullptr) {
      auto const& x = of.x;
      memory_.emplace(x.size());
      out = x.stride_c == 1 ? nhwc(memory_->data(), x.samples, x.channels, x.spatial)
                            : nchw(memory_->data(), x.samples, x.channels, x.spatial);
    }
    view_ = out;
    if (!is_made || memory_)
      activation_gradient<T>(exec, of.dy, of.x, out, of.mean, of.inv_std, of.affine, of.epilogue);
  }

  [[nodiscard]] tensor_view<T const> const& view() const { return view_; }

private:
  tensor_view<T const> view_;
  std::optional<scratch_lease<T>> memory_;
};

template <class T>
void second_order_reduce(executor_ref exec, second_order_operands<T> const& of, tensor_view<T const> const& g,
                         second_order_sums const& sums) {
  backward_reduce(exec, of.dy, of.x, of.mean, of.inv_std, of.affine, of.epilogue, sums.g, sums.g_xmu);
  for (auto const& each : {sums.u, sums.u_xmu, sums.u_g}) std::ranges::fill(each, 0.0);
  if (of.u.data == nullptr) return;
  bool const zeroes = of.epilogue.written() != nullptr;
  auto const by = zeroes ? of.epilogue.mask_alone() : prepared_epilogue<T>{};
  scratch_lease<double> zero{of.x.channels};
  std::span<double> const mean{zero.data(), sums.g.size()};
  std::ranges::fill(mean, 0.0);
  backward_reduce(exec, of.u, g, mean, of.inv_std, of.affine, by, sums.u, sums.u_g);
  backward_reduce(exec, of.u, of.x, of.mean, of.inv_std, of.affine, of.epilogue.mask_alone(), sums.u, sums.u_xmu);
}

template <class T>
void second_order_elemt(executor_ref exec, second_order_operands<T> const& of, tensor_view<T const> const& g,
                        std::span<combination const> for_dy, std::span<combination const> for_x, stores how) {
  // The gradient to x comes first, since the other may overwrite g.
  if (of.to_x.data != nullptr) combine_counted(exec, of.u, g, of.x, of.to_x, for_x, of.epilogue.counted(), how);
  if (of.to_dy.data == nullptr) return;
  if (of.epilogue.gates())
    combine_gated(exec, of.u, of.v, of.x, of.to_dy, for_dy, of.mean, of.inv_std, of.affine, of.epilogue, how);
  else
    combine(exec, of.u, of.v, of.x, of.to_dy, for_dy, how);
}

/// Calls f(executor, operands, first, length) for blocks of channels of which everything fits the cache, or for all.
template <class T, class F>
void for_blocks(executor_ref exec, second_order_operands<T> const& of, F const& f) {
  auto const tensors = 2 + (of.u.data != nullptr ? 1 : 0) + (of.v.data != nullptr ? 1 : 0) +
                       (of.epilogue.gates() ? 1 : 0) + (of.epilogue.has_residual() ? 1 : 0);
  std::int64_t const block = std::min(channel_block(of.x, tensors), channel_block(of.dy, tensors));
  if (!worth_blocking(exec, of.x, block)) return f(exec, of, std::int64_t{0}, of.x.channels);
  channel_blocks const blocks{of.x.channels, block};
  exec.for_each(blocks.count, [&](std::int64_t i) {
    std::int64_t const first = blocks.first(i), length = blocks.size(i);
    f(serial_executor{}, of.channel_range(first, length), first, length);
  });
}

} // namespace detail

/// The sums of a double backward pass. Where the epilogue activates or makes outputs 0, to_dy then holds g, for
/// `second_order_elemt`. Local. Every tensor is read once from memory where blocks of channels fit the cache.
template <class T>
void second_order_reduce(executor_ref exec, second_order_operands<T> const& of, second_order_sums const& sums) {
  detail::for_blocks(
      exec, of, [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first, std::int64_t length) {
        detail::activated_gradient<T> const g{by, part, false};
        detail::second_order_reduce(by, part, g.view(), sums.channel_range(first, length));
      });
}

/// to_dy and to_x by the combinations of each channel, `[C]`: w·f′·(u·scale_a + v·scale_b + …) and u·scale_a + g·scale_b + …,
/// the latter g·scale_b alone where positions do not count. Local; after `second_order_reduce`, and as it.
template <class T>
void second_order_elemt(executor_ref exec, second_order_operands<T> const& of, std::span<combination const> for_dy,
                        std::span<combination const> for_x) {
  auto const how = stores_for(of.x);
  detail::for_blocks(
      exec, of, [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first, std::int64_t length) {
        detail::activated_gradient<T> const g{by, part, true};
        detail::second_order_elemt(by, part, g.view(), detail::channels_of(for_dy, first, length),
                                   detail::channels_of(for_x, first, length), how);
      });
}

/// Both, with the sums of this rank, of which `finish(first, length)` makes the combinations of a span of channels. Every
/// tensor is read once from memory where blocks of channels fit the cache.
template <class T>
void second_order_in_blocks(executor_ref exec, second_order_operands<T> const& of, second_order_sums const& sums,
                            std::span<combination const> for_dy, std::span<combination const> for_x,
                            function_ref<void(std::int64_t, std::int64_t)> finish) {
  auto const how = stores_for(of.x);
  detail::for_blocks(
      exec, of, [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first, std::int64_t length) {
        detail::activated_gradient<T> const g{by, part, false};
        detail::second_order_reduce(by, part, g.view(), sums.channel_range(first, length));
        finish(first, length);
        detail::second_order_elemt(by, part, g.view(), detail::channels_of(for_dy, first, length),
                                   detail::channels_of(for_x, first, length), how);
      });
}

} // namespace syncnorm::host
