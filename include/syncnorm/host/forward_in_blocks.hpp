#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/linear_op.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// local_moments, `finish` and normalize, block of channels by block where that keeps the second reading of x in the
/// cache. `finish(first, length)` is called for disjoint ranges of channels, possibly at the same time; it finds their
/// mean and m2 and leaves their inv_std. The bits are those of the three calls one after the other.
///
/// Shapes: x and y `[N, C, S]`, the rest `[C]`. Local. y may be x.
template <class T>
requires element<T>
void forward_in_blocks(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                       std::span<double> mean, std::span<double> m2, std::span<double const> inv_std,
                       affine_values const& params, function_ref<void(std::int64_t, std::int64_t)> finish,
                       stores how = stores::automatic) {
  if (how == stores::automatic) how = stores_for(y);
  std::int64_t const block = detail::block_of_channels(x);
  if (!detail::worth_blocking(exec, x, block, 1)) {
    local_moments(exec, x, mean, m2);
    finish(std::int64_t{0}, x.channels);
    normalize(exec, x, y, mean, inv_std, params, how);
    return;
  }
  auto const reduce = [&](std::int64_t first, std::int64_t length) {
    local_moments(serial_executor{}, x.channel_range(first, length), detail::channels_of(mean, first, length),
                  detail::channels_of(m2, first, length));
    finish(first, length);
  };
  auto const terms = [&](std::int64_t first, std::int64_t length) {
    return detail::normalize_terms<accumulate_t<T>>{detail::channels_of(std::span<double const>{mean}, first, length),
                                                    detail::channels_of(inv_std, first, length),
                                                    params.gamma.from(first), params.beta.from(first)};
  };
  auto const map = detail::map_of_channels<T>(detail::linear_op<1>{}, {x}, {y}, nullptr, how, terms);
  detail::channel_blocks const blocks{x.channels, block};
  if (!detail::suits_row_pipeline<detail::moment_rows<T>>(blocks, std::array{x}, std::array{y}))
    return detail::reduce_and_map<T>(exec, blocks, x, 1, reduce, map);
  detail::groups const parts{x};
  auto const rows = [&](std::int64_t first, std::int64_t length) {
    return detail::moment_rows<T>{x.channel_range(first, length), parts};
  };
  detail::reduce_and_map_rows<T>(exec, blocks, x, parts, {1, detail::map_fetches::nothing}, rows,
                                 {mean.data(), m2.data()}, finish, map);
}

} // namespace syncnorm::host
