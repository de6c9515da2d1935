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
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/map_elements.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/detail/second_order_op.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
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

/// What is summed of a pass with u.
template <class T>
[[nodiscard]] second_order_terms<accumulate_t<T>> terms_to_sum(second_order_operands<T> const& of) {
  auto const& by = of.epilogue;
  return {activated_by(of), linear_activation<accumulate_t<T>>{by.activation()}, by.activates_residual()};
}
template <class T>
[[nodiscard]] std::array<tensor_view<T const>, 4> inputs_to_sum(second_order_operands<T> const& of) {
  return {of.dy, of.x, of.u, of.epilogue.activated_residual(of.x)};
}
[[nodiscard]] inline sums_of_channels<5> in_order_of_terms(double_backward_sums const& sums) {
  return {sums.g.data(), sums.g_xmu.data(), sums.u.data(), sums.u_xmu.data(), sums.u_g.data()};
}

template <class T>
void sum_second_order(executor_ref exec, second_order_operands<T> const& of, double_backward_sums const& sums) {
  using A = accumulate_t<T>;
  auto const& by = of.epilogue;
  if (of.u.data == nullptr) {
    backward_reduce(exec, of.dy, of.x, of.mean, of.inv_std, of.affine, by, sums.g, sums.g_xmu);
    for (auto const& each : {sums.u, sums.u_xmu, sums.u_g}) std::ranges::fill(each, 0.0);
    return;
  }
  reduce_products<T>(exec, terms_to_sum(of), inputs_to_sum(of), by.written(), in_order_of_terms(sums));
  if (by.written() != by.counted())
    reduce_products<T>(exec, gradient_terms<A>{of.mean}, {of.u, of.x}, by.counted(),
                       {sums.u.data(), sums.u_xmu.data()});
}

/// A pass's map, with the combinations of all its channels.
template <class T>
struct second_order_map {
  using A = accumulate_t<T>;
  using op_type = second_order_op<A>;

  second_order_operands<T> of;
  std::span<combination const> for_dy, for_x;

  [[nodiscard]] bool has_u() const { return of.u.data != nullptr; }
  [[nodiscard]] bool has_v() const { return of.v.data != nullptr; }
  [[nodiscard]] bool has_outputs() const { return of.to_dy.data != nullptr || of.to_x.data != nullptr; }
  [[nodiscard]] op_type op() const {
    auto const& by = of.epilogue;
    return {linear_activation<A>{by.activation()}, by.activates_residual(), by.written() == nullptr ? A{1} : A{0}};
  }
  /// What is read in any case stands in for what there is not.
  [[nodiscard]] std::array<tensor_view<T const>, op_type::inputs> inputs() const {
    return {of.dy, of.x, has_u() ? of.u : of.dy, has_v() ? of.v : of.dy, of.epilogue.activated_residual(of.x)};
  }
  [[nodiscard]] std::array<tensor_view<T>, op_type::outputs> outputs() const {
    auto const or_nowhere = [&](tensor_view<T> const& out) { return out.data == nullptr ? nowhere<T>(of.x) : out; };
    return {or_nowhere(of.to_dy), or_nowhere(of.to_x)};
  }
  [[nodiscard]] second_order_op_terms<A> terms(std::int64_t first, std::int64_t length) const {
    return {activated_by(of.channel_range(first, length)), channels_of(for_dy, first, length),
            channels_of(for_x, first, length), has_u(), has_v()};
  }

  /// Of some channels.
  void operator()(executor_ref exec, std::int64_t first, std::int64_t length, stores how) const {
    if (has_outputs())
      map_elements<T>(exec, op(), terms(first, length), channels_of(inputs(), first, length),
                      channels_of(outputs(), first, length), of.epilogue.counted(), how);
  }
};

} // namespace detail

/// The sums of a double backward pass. Local. The same bits whatever the executor.
template <class T>
void double_backward_reduce(executor_ref exec, second_order_operands<T> const& of, double_backward_sums const& sums) {
  detail::sum_second_order(exec, of.in_order(), sums);
}

/// to_dy and to_x by the combinations of each channel, `[C]`: w·f′·(u·scale_a + v·scale_b + …) and u·scale_a + g·scale_b + …,
/// the latter g·scale_b alone where positions do not count. What a scale of 0 meets may be anything. Local. Each may be one of the
/// inputs.
template <class T>
void double_backward_elemt(executor_ref exec, second_order_operands<T> const& of, std::span<combination const> for_dy,
                           std::span<combination const> for_x) {
  detail::second_order_map<T>{of.in_order(), for_dy, for_x}(exec, 0, of.x.channels, stores_for(of.x));
}

/// Both, with the sums of this rank, of which `finish(first, length)` makes the combinations of a span of channels. Every
/// tensor is read once from memory where blocks of channels fit the cache. The bits are those of the two calls.
template <class T>
void double_backward_in_blocks(executor_ref exec, second_order_operands<T> const& given,
                               double_backward_sums const& sums, std::span<combination const> for_dy,
                               std::span<combination const> for_x,
                               function_ref<void(std::int64_t, std::int64_t)> finish) {
  auto const of = given.in_order();
  auto const how = stores_for(of.x);
  detail::second_order_map<T> const map{of, for_dy, for_x};
  std::int64_t const summed = 2 + (map.has_u() ? 1 : 0) + (of.epilogue.activates_residual() ? 1 : 0),
                     read = summed + (map.has_v() ? 1 : 0);
  std::int64_t const block = std::min(channel_block(of.x, read), channel_block(of.dy, read));
  detail::channel_blocks const blocks{of.x.channels, block};
  using sums_of = detail::terms_of_lanes<detail::second_order_terms<accumulate_t<T>>>;
  using rows_type = detail::product_rows<T, sums_of>;
  bool const pipelined = map.has_u() && of.epilogue.written() == of.epilogue.counted() &&
                         detail::suits_row_pipeline<rows_type>(blocks, map.inputs(), map.outputs());
  if (!map.has_outputs() || !detail::worth_blocking(exec, of.x, block, pipelined ? summed : 0)) {
    detail::sum_second_order(exec, of, sums);
    finish(0, of.x.channels);
    return map(exec, 0, of.x.channels, how);
  }
  if (pipelined) {
    auto const rows = [&](std::int64_t first, std::int64_t length) {
      return rows_type{sums_of{detail::terms_to_sum(of), first},
                       detail::channels_of(detail::inputs_to_sum(of), first, length), of.epilogue.written()};
    };
    auto const fetched = map.has_v() ? detail::map_fetches::next_piece : detail::map_fetches::next_sums;
    return detail::reduce_and_map_rows<T>(
        exec, blocks, of.x, detail::groups{of.x}, {summed, fetched}, rows, detail::in_order_of_terms(sums), finish,
        detail::map_of_channels<T>(map.op(), map.inputs(), map.outputs(), of.epilogue.counted(), how,
                                   [&](std::int64_t first, std::int64_t length) { return map.terms(first, length); }));
  }
  detail::for_each_block(exec, blocks, [&](std::int64_t first, std::int64_t length) {
    detail::sum_second_order<T>(serial_executor{}, of.channel_range(first, length), sums.channel_range(first, length));
    finish(first, length);
    map(serial_executor{}, first, length, how);
  });
}

} // namespace syncnorm::host
