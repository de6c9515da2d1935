#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include <syncnorm/core/detail/argument_check.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/power_backward.hpp>
#include <syncnorm/host/second_moments.hpp>

namespace syncnorm::host {

namespace detail {

template <class T>
struct named_view {
  tensor_view<T const> view;
  char const* name;
};

/// Throws what is wrong with tensors of a scaling: `read`, of which x is the first, and `written`, which may be one of them.
template <class T>
void check_scaling(char const* pass, channel_scaling const& scaling,
                   std::type_identity_t<std::initializer_list<named_view<T>>> read, named_view<T> const& written) {
  auto const& x = read.begin()->view;
  syncnorm::detail::argument_check check;
  check.tensor(x, "x", x.channels);
  check.groups(x.channels, scaling.groups);
  check.eps(scaling.eps);
  for (auto const& each : read) check.same_extents(each.view, each.name, x);
  check.output(written.view, written.name, x);
  for (auto const& each : read) check.apart<T>(written.view, written.name, each.view, each.name, true);
  if (check.failed()) throw invalid_argument_error{check.text(pass, ": ", check.fault())};
}

/// `channels` ones and as many zeros.
template <class A>
void fill_identity(A* table, std::int64_t channels) {
  for (std::int64_t c = 0; c < channels; ++c) {
    table[c] = A{1};
    table[channels + c] = A{0};
  }
}

} // namespace detail

/// Scales each group of consecutive channels to a mean square of about 1, at each position for itself:
///
///     y = x/√(mean of x² over the group's channels + eps)
///
/// x and y `[N, C, S]`, C a multiple of `scaling.groups` ≥ 1. Local; y may be x, and may not overlap it otherwise.
/// Squares are taken and summed in `accumulate_t<T>`: where those of float overflow, y is 0. Throws invalid_argument_error.
/// Source: the authors' code of "PowerNorm" (Shen et al., 2020), GroupScaling1D.
template <class T>
requires element<T>
void group_scaling(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                   channel_scaling const& scaling) {
  using A = accumulate_t<T>;
  detail::check_scaling<T>("group_scaling", scaling, {{x, "x"}}, {y, "y"});
  detail::scratch_lease<A> table{2 * x.channels};
  detail::fill_identity(table.data(), x.channels);
  detail::power_forward_pass<false, true, T>(exec, x, y, {}, scaling, table.data(), table.data() + x.channels, {}, {});
}

/// The gradient of `group_scaling`, r = 1/√(mean of x² + eps) and u = x·r:
///
///     dx = r·(dy − u·(mean of dy·u over the group's channels))
///
/// dy, x and dx `[N, C, S]`. Local; dx may be dy or x, and may not overlap them otherwise. Throws
/// invalid_argument_error.
template <class T>
requires element<T>
void group_scaling_backward(executor_ref exec, std::type_identity_t<tensor_view<T const>> dy,
                            std::type_identity_t<tensor_view<T const>> x, tensor_view<T> dx,
                            channel_scaling const& scaling) {
  using A = accumulate_t<T>;
  detail::check_scaling<T>("group_scaling_backward", scaling, {{x, "x"}, {dy, "dy"}}, {dx, "dx"});
  detail::scratch_lease<A> table{2 * x.channels};
  detail::fill_identity(table.data(), x.channels);
  detail::power_backward_pass<false, true, T>(exec, dy, x, dx, {}, scaling, table.data(), table.data() + x.channels, {},
                                              {});
}

} // namespace syncnorm::host
