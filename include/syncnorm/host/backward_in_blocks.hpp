#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/linear_op.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// backward_reduce and backward_elemt with the sums of this rank, block of channels by block where that keeps the second
/// reading of dy and x in the cache, or, by constant statistics, count 0, piece by piece. The bits are those of the two calls one after
/// the other.
///
/// Shapes: dy, x and dx `[N, C, S]`, the rest `[C]`. Local. dx may be dy or x.
template <class T>
requires element<T>
void backward_in_blocks(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                        std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dx, std::span<double const> mean,
                        std::span<double const> inv_std, channel_values const& gamma, std::span<double> sum_dy,
                        std::span<double> sum_dy_xmu, normalized_count count, stores how = stores::automatic) {
  if (how == stores::automatic) how = stores_for(dx);
  using A = accumulate_t<T>;
  auto const map_of_dy = detail::map_of_channels<T>(
      detail::linear_op<1>{}, {dy}, {dx}, nullptr, how, [&](std::int64_t first, std::int64_t length) {
        return detail::constant_gradient_terms<A>{detail::channels_of(inv_std, first, length), gamma.from(first)};
      });
  if (count.n == 0 && dx.data != x.data &&
      detail::sum_and_map<T>(exec, detail::gradient_terms<A>{mean}, {dy, x}, std::array{dx},
                             {sum_dy.data(), sum_dy_xmu.data()}, map_of_dy))
    return;
  std::int64_t const block = std::min(detail::block_of_channels(x, 2), detail::block_of_channels(dy, 2));
  if (!detail::worth_blocking(exec, x, block, 2)) {
    backward_reduce(exec, dy, x, mean, sum_dy, sum_dy_xmu);
    backward_elemt(exec, dy, x, dx, mean, inv_std, gamma, sum_dy, sum_dy_xmu, count, how);
    return;
  }
  auto const reduce = [&](std::int64_t first, std::int64_t length) {
    backward_reduce(serial_executor{}, dy.channel_range(first, length), x.channel_range(first, length),
                    detail::channels_of(mean, first, length), detail::channels_of(sum_dy, first, length),
                    detail::channels_of(sum_dy_xmu, first, length));
  };
  detail::channel_blocks const blocks{x.channels, block};
  if (count.n == 0) return detail::reduce_and_map<T>(exec, blocks, dy, 2, reduce, map_of_dy);
  auto const terms = [&](std::int64_t first, std::int64_t length) {
    return detail::backward_elemt_terms<A>{detail::channels_of(mean, first, length),
                                           detail::channels_of(inv_std, first, length),
                                           gamma.from(first),
                                           detail::channels_of(std::span<double const>{sum_dy}, first, length),
                                           detail::channels_of(std::span<double const>{sum_dy_xmu}, first, length),
                                           count};
  };
  auto const map = detail::map_of_channels<T>(detail::linear_op<2>{}, {dy, x}, {dx}, nullptr, how, terms);
  using sums_of = detail::terms_of_lanes<detail::gradient_terms<A>>;
  using rows_type = detail::product_rows<T, sums_of>;
  if (!detail::suits_row_pipeline<rows_type>(blocks, std::array{dy, x}, std::array{dx}))
    return detail::reduce_and_map<T>(exec, blocks, x, 2, reduce, map);
  auto const rows = [&](std::int64_t first, std::int64_t length) {
    return rows_type{
        sums_of{{mean}, first}, {dy.channel_range(first, length), x.channel_range(first, length)}, nullptr};
  };
  auto const finish = [](std::int64_t, std::int64_t) {};
  detail::reduce_and_map_rows<T>(exec, blocks, x, detail::groups{x}, {2, detail::map_fetches::next_sums}, rows,
                                 {sum_dy.data(), sum_dy_xmu.data()}, finish, map);
}

} // namespace syncnorm::host
