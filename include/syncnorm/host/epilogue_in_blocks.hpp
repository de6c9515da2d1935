#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_in_blocks.hpp>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/masked_moment_rows.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/product_reduce.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/forward_in_blocks.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// `forward_in_blocks` with an epilogue, of whose statistics only the positions that count are part. Every tensor is read
/// once from memory where blocks of channels of x fit the cache. `finish` as there.
template <class T>
requires element<T>
void forward_in_blocks(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                       std::span<double> mean, std::span<double> m2, std::span<double const> inv_std,
                       affine_values const& params, function_ref<void(std::int64_t, std::int64_t)> finish,
                       std::type_identity_t<prepared_epilogue<T>> const& epilogue, stores how = stores::automatic) {
  if (!epilogue.does_something()) return forward_in_blocks(exec, x, y, mean, m2, inv_std, params, finish, how);
  if (epilogue.is_transposed())
    return forward_in_blocks(exec, detail::transposed(x), detail::transposed(y), mean, m2, inv_std, params, finish,
                             epilogue.of_transposed(), how);
  if (how == stores::automatic) how = stores_for(y);
  std::int64_t const block = detail::block_of_channels(x);
  if (!detail::worth_blocking(exec, x, block, 1)) {
    local_moments(exec, x, epilogue, mean, m2);
    finish(std::int64_t{0}, x.channels);
    normalize(exec, x, y, mean, inv_std, params, epilogue, how);
    return;
  }
  auto const reduce = [&](std::int64_t first, std::int64_t length) {
    local_moments(serial_executor{}, x.channel_range(first, length), epilogue, detail::channels_of(mean, first, length),
                  detail::channels_of(m2, first, length));
    finish(first, length);
  };
  detail::channel_blocks const blocks{x.channels, block};
  using A = accumulate_t<T>;
  detail::with_activation(epilogue, [&]<class F, bool Residual>(F const& f, std::bool_constant<Residual>) {
    using op_type = detail::epilogue_op<F, Residual>;
    std::int64_t const inputs = epilogue.has_residual() ? 2 : 1;
    std::array<tensor_view<T const>, op_type::inputs> in{x};
    if constexpr (Residual) in[1] = epilogue.residual_or(x);
    auto const map = detail::map_of_channels<T>(
        op_type{f}, in, {y}, epilogue.written(), how, [&](std::int64_t first, std::int64_t length) {
          auto const of_block = params.from(first);
          return detail::normalize_terms<A>{detail::channels_of(std::span<double const>{mean}, first, length),
                                            detail::channels_of(inv_std, first, length), of_block.gamma, of_block.beta};
        });
    auto const in_rows = [&]<class Rows>(std::type_identity<Rows>, auto const& parts) {
      auto const rows = [&](std::int64_t first, std::int64_t length) {
        return Rows{x.channel_range(first, length), parts};
      };
      auto const fetched = inputs == 1 ? detail::map_fetches::next_sums : detail::map_fetches::next_piece;
      detail::reduce_and_map_rows<T>(exec, blocks, x, parts, {1, fetched}, rows, {mean.data(), m2.data()}, finish, map);
    };
    if (!detail::suits_row_pipeline<detail::moment_rows<T>>(blocks, in, std::array{y}))
      detail::reduce_and_map<T>(exec, blocks, x, inputs, reduce, map);
    else if (epilogue.counted() == nullptr)
      in_rows(std::type_identity<detail::moment_rows<T>>{}, detail::groups{x});
    else
      in_rows(std::type_identity<detail::masked_moment_rows<T>>{}, detail::masked_groups{*epilogue.counted()});
  });
}

/// `backward_in_blocks` with an epilogue; dx and dresidual as for `backward_elemt`.
template <class X>
requires element<X>
void backward_in_blocks(executor_ref exec, tensor_view<X> dy, std::type_identity_t<tensor_view<X const>> x,
                        std::type_identity_t<tensor_view<std::remove_const_t<X>>> dx,
                        std::type_identity_t<tensor_view<std::remove_const_t<X>>> dresidual,
                        std::span<double const> mean, std::span<double const> inv_std, affine_values const& params,
                        std::span<double> sum_dy, std::span<double> sum_dy_xmu, normalized_count count,
                        prepared_epilogue<std::remove_const_t<X>> const& epilogue, stores how = stores::automatic) {
  using T = std::remove_const_t<X>;
  if (!epilogue.does_something() && dx.data != nullptr)
    return backward_in_blocks(exec, dy, x, dx, mean, inv_std, params.gamma, sum_dy, sum_dy_xmu, count, how);
  if (epilogue.is_transposed())
    return backward_in_blocks(exec, detail::transposed(dy), detail::transposed(x), detail::transposed(dx),
                              detail::transposed(dresidual), mean, inv_std, params, sum_dy, sum_dy_xmu, count,
                              epilogue.of_transposed(), how);
  if (how == stores::automatic) how = stores_for(x);
  std::int64_t const inputs = epilogue.activates_residual() ? 3 : 2;
  std::int64_t const block = std::min(detail::block_of_channels(x, inputs), detail::block_of_channels(dy, inputs));
  bool const worth_blocking = detail::worth_blocking(exec, x, block, inputs);
  auto const in_two_calls = [&] {
    backward_reduce(exec, dy, x, mean, inv_std, params, epilogue, sum_dy, sum_dy_xmu);
    backward_elemt(exec, dy, x, dx, dresidual, mean, inv_std, params, sum_dy, sum_dy_xmu, count, epilogue, how);
  };
  bool const constant = count.n == 0;
  if (!epilogue.does_something() || detail::writes_no_gradient(dx, dresidual, epilogue.has_residual()) ||
      (!worth_blocking && !constant))
    return in_two_calls();
  using A = accumulate_t<T>;
  auto const reduce = [&](std::int64_t first, std::int64_t length) {
    backward_reduce(serial_executor{}, dy.channel_range(first, length), x.channel_range(first, length),
                    detail::channels_of(mean, first, length), detail::channels_of(inv_std, first, length),
                    params.from(first), epilogue.channel_range(first, length),
                    detail::channels_of(sum_dy, first, length), detail::channels_of(sum_dy_xmu, first, length));
  };
  detail::channel_blocks const blocks{x.channels, block};
  if (dx.data == nullptr) dx = detail::nowhere<T>(x);
  if (dresidual.data == nullptr) dresidual = detail::nowhere<T>(x);
  detail::with_activation(epilogue, [&]<class F, bool Residual>(F const& f, std::bool_constant<Residual>) {
    std::array<tensor_view<T const>, Residual ? 3 : 2> in{dy, x};
    std::array<tensor_view<T>, Residual ? 2 : 1> out{dx};
    if constexpr (Residual) in[2] = epilogue.activated_residual(x), out[1] = dresidual;
    detail::epilogue_gradient_op<F, Residual> const op{f, epilogue.written() == nullptr ? A{1} : A{0}, constant};
    auto const map =
        detail::map_of_channels<T>(op, in, out, epilogue.counted(), how, [&](std::int64_t first, std::int64_t length) {
          auto const of_block = params.from(first);
          return detail::epilogue_gradient_terms<A>{
              detail::channels_of(mean, first, length),
              detail::channels_of(inv_std, first, length),
              of_block.gamma,
              of_block.beta,
              detail::channels_of(std::span<double const>{sum_dy}, first, length),
              detail::channels_of(std::span<double const>{sum_dy_xmu}, first, length),
              count};
        });
    detail::activated_gradient_terms<F, Residual> const terms{{mean, inv_std, params}, f};
    if (constant) {
      if (epilogue.written() == nullptr && epilogue.counted() == nullptr &&
          detail::sum_and_map<T>(exec, terms, in, out, {sum_dy.data(), sum_dy_xmu.data()}, map))
        return;
      if (!worth_blocking) return in_two_calls();
    } else {
      using sums_of = detail::terms_of_lanes<detail::activated_gradient_terms<F, Residual>>;
      using rows_type = detail::product_rows<T, sums_of>;
      if (detail::suits_row_pipeline<rows_type>(blocks, in, out)) {
        auto const rows = [&](std::int64_t first, std::int64_t length) {
          return rows_type{sums_of{terms, first}, detail::channels_of(in, first, length), epilogue.written()};
        };
        auto const finish = [](std::int64_t, std::int64_t) {};
        return detail::reduce_and_map_rows<T>(exec, blocks, x, detail::groups{x},
                                              {inputs, detail::map_fetches::next_sums}, rows,
                                              {sum_dy.data(), sum_dy_xmu.data()}, finish, map);
      }
    }
    detail::reduce_and_map<T>(exec, blocks, x, inputs, reduce, map);
  });
}

} // namespace syncnorm::host
