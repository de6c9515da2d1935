#pragma once

#include <array>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// `normalize` of one part of a tensor's channels, and `local_moments` of the part after it, `next`; at the same time where
/// rows are contiguous and the executor is serial, if reading and writing memory at once is faster than one after the
/// other. The bits are those of the two calls.
///
/// Shapes: x and y `[N, C, S]`, next `[N, C', S]`, the rest `[C]` or `[C']`. Local. y may be x.
template <class T>
requires element<T>
void normalize_and_local_moments(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                                 std::span<double const> mean, std::span<double const> inv_std,
                                 affine_values const& params, stores how,
                                 std::type_identity_t<tensor_view<T const>> next, std::span<double> next_mean,
                                 std::span<double> next_m2, detail::processor const& on = detail::processor::here()) {
  using rows = detail::moment_rows<T>;
  detail::normalize_terms<accumulate_t<T>> const terms{mean, inv_std, params.gamma, params.beta};
  if (detail::suits_map_and_sum<rows>(exec, std::array{x}, y, next.channels, on) &&
      detail::map_and_sum_rows<T>(terms, std::array{x}, y, how, rows{next, detail::groups{next}}, next.channels,
                                  {next_mean.data(), next_m2.data()}, on))
    return;
  normalize(exec, x, y, mean, inv_std, params, how, next_block::of(x, 1, x.channels, on));
  local_moments(exec, next, next_mean, next_m2);
}

/// The same for `backward_elemt` and `backward_reduce`. dx may be dy or x.
template <class T>
requires element<T>
void backward_elemt_and_reduce(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                               std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dx,
                               std::span<double const> mean, std::span<double const> inv_std,
                               channel_values const& gamma, std::span<double const> sum_dy,
                               std::span<double const> sum_dy_xmu, normalized_count count, stores how,
                               std::type_identity_t<tensor_view<T const>> next_dy,
                               std::type_identity_t<tensor_view<T const>> next_x, std::span<double const> next_mean,
                               std::span<double> next_sum_dy, std::span<double> next_sum_dy_xmu,
                               detail::processor const& on = detail::processor::here()) {
  using sums_of = detail::terms_of_lanes<detail::gradient_terms<accumulate_t<T>>>;
  using rows = detail::product_rows<T, sums_of>;
  detail::backward_elemt_terms<accumulate_t<T>> const terms{mean, inv_std, gamma, sum_dy, sum_dy_xmu, count};
  if (count.n != 0 && detail::suits_map_and_sum<rows>(exec, std::array{dy, x}, dx, next_x.channels, on) &&
      detail::map_and_sum_rows<T>(terms, std::array{dy, x}, dx, how,
                                  rows{sums_of{{next_mean}}, {next_dy, next_x}, nullptr}, next_x.channels,
                                  {next_sum_dy.data(), next_sum_dy_xmu.data()}, on))
    return;
  backward_elemt(exec, dy, x, dx, mean, inv_std, gamma, sum_dy, sum_dy_xmu, count, how,
                 next_block::of(x, 2, x.channels, on));
  backward_reduce(exec, next_dy, next_x, next_mean, next_sum_dy, next_sum_dy_xmu);
}

} // namespace syncnorm::host
