#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/map_elements.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/second_order_op.hpp>
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
  /// The same in the order that the epilogue has.
  [[nodiscard]] second_order_operands in_order() const {
    auto same = *this;
    if (!epilogue.is_transposed()) return same;
    for (auto* const view : {&same.dy, &same.x, &same.u, &same.v}) *view = detail::transposed(*view);
    for (auto* const view : {&same.to_dy, &same.to_x}) *view = detail::transposed(*view);
    same.epilogue = epilogue.of_transposed();
    return same;
  }
};

/// Sums of a batch's channels, `[C]` each: Σ g, Σ g·(x − mean), Σ m·u, Σ m·u·(x − mean) and Σ u·g.
struct double_backward_sums {
  std::span<double> g, g_xmu, u, u_xmu, u_g;

  [[nodiscard]] double_backward_sums channel_range(std::int64_t first, std::int64_t length) const {
    auto part = *this;
    for (auto* const sums : {&part.g, &part.g_xmu, &part.u, &part.u_xmu, &part.u_g})
      *sums = detail::channels_of(*sums, first, length);
    return part;
  }
};

namespace detail {

template <class T>
[[nodiscard]] activated_channels activated_by(second_order_operands<T> const& of) {
  return {of.mean, of.inv_std, of.affine};
}

template <class T>
void reduce_block(executor_ref exec, second_order_operands<T> const& of, double_backward_sums const& sums) {
  using A = accumulate_t<T>;
  auto const& by = of.epilogue;
  backward_reduce(exec, of.dy, of.x, of.mean, of.inv_std, of.affine, by, sums.g, sums.g_xmu);
  if (of.u.data == nullptr) {
    for (auto const& each : {sums.u, sums.u_xmu, sums.u_g}) std::ranges::fill(each, 0.0);
    return;
  }
  reduce_products<T>(
      exec, second_order_terms<A>{activated_by(of), linear_activation<A>{by.activation()}, by.activates_residual()},
      {of.dy, of.x, of.u, by.activated_residual(of.x)}, by.written(), sums.u, sums.u_g);
  reduce_products<T>(exec, gradient_terms<A>{of.mean}, {of.u, of.x}, by.counted(), sums.u, sums.u_xmu);
}

template <class T>
void map_block(executor_ref exec, second_order_operands<T> const& of, std::span<combination const> for_dy,
               std::span<combination const> for_x, stores how) {
  using A = accumulate_t<T>;
  auto const& by = of.epilogue;
  if (of.to_dy.data == nullptr && of.to_x.data == nullptr) return;
  bool const has_u = of.u.data != nullptr, has_v = of.v.data != nullptr;
  second_order_op_terms<A> const terms{activated_by(of), for_dy, for_x, has_u, has_v};
  A const uncounted = by.written() == nullptr ? A{1} : A{0};
  // What is read in any case stands in for what there is not.
  auto const &u = has_u ? of.u : of.dy, &v = has_v ? of.v : of.dy;
  auto const or_nowhere = [&](tensor_view<T> const& out) { return out.data == nullptr ? nowhere<T>(of.x) : out; };
  std::array const out{or_nowhere(of.to_dy), or_nowhere(of.to_x)};
  map_elements<T>(exec, second_order_op<A>{linear_activation<A>{by.activation()}, by.activates_residual(), uncounted},
                  terms, {of.dy, of.x, u, v, by.activated_residual(of.x)}, out, by.counted(), how);
}

/// Calls f(executor, operands, first, length) for blocks of channels of which everything fits the cache, or for all.
template <class T, class F>
void for_blocks(executor_ref exec, second_order_operands<T> const& given, F const& f) {
  auto const of = given.in_order();
  auto const tensors =
      2 + (of.u.data != nullptr ? 1 : 0) + (of.v.data != nullptr ? 1 : 0) + (of.epilogue.activates_residual() ? 1 : 0);
  std::int64_t const block = std::min(channel_block(of.x, tensors), channel_block(of.dy, tensors));
  if (!worth_blocking(exec, of.x, block)) return f(exec, of, std::int64_t{0}, of.x.channels);
  for_each_block(exec, {of.x.channels, block}, [&](std::int64_t first, std::int64_t length) {
    f(serial_executor{}, of.channel_range(first, length), first, length);
  });
}

} // namespace detail

/// The sums of a double backward pass. Local. Every tensor is read once from memory where blocks of channels fit the cache. The same
/// bits whatever the executor.
template <class T>
void double_backward_reduce(executor_ref exec, second_order_operands<T> const& of, double_backward_sums const& sums) {
  detail::for_blocks(exec, of,
                     [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first,
                         std::int64_t length) { detail::reduce_block(by, part, sums.channel_range(first, length)); });
}

/// to_dy and to_x by the combinations of each channel, `[C]`: w·f′·(u·scale_a + v·scale_b + …) and u·scale_a + g·scale_b + …,
/// the latter g·scale_b alone where positions do not count. What a scale of 0 meets may be anything. Local. Each may be one of the
/// inputs.
template <class T>
void double_backward_elemt(executor_ref exec, second_order_operands<T> const& of, std::span<combination const> for_dy,
                           std::span<combination const> for_x) {
  auto const how = stores_for(of.x);
  detail::for_blocks(
      exec, of, [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first, std::int64_t length) {
        detail::map_block(by, part, detail::channels_of(for_dy, first, length),
                          detail::channels_of(for_x, first, length), how);
      });
}

/// Both, with the sums of this rank, of which `finish(first, length)` makes the combinations of a span of channels. Every
/// tensor is read once from memory where blocks of channels fit the cache.
template <class T>
void double_backward_in_blocks(executor_ref exec, second_order_operands<T> const& of, double_backward_sums const& sums,
                               std::span<combination const> for_dy, std::span<combination const> for_x,
                               function_ref<void(std::int64_t, std::int64_t)> finish) {
  auto const how = stores_for(of.x);
  detail::for_blocks(
      exec, of, [&](executor_ref by, second_order_operands<T> const& part, std::int64_t first, std::int64_t length) {
        detail::reduce_block(by, part, sums.channel_range(first, length));
        finish(first, length);
        detail::map_block(by, part, detail::channels_of(for_dy, first, length),
                          detail::channels_of(for_x, first, length), how);
      });
}

} // namespace syncnorm::host
