#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include <syncnorm/core/detail/overlap.hpp>
#include <syncnorm/core/detail/view_checks.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/power_backward.hpp>
#include <syncnorm/host/second_moments.hpp>

namespace syncnorm::host {

namespace detail {

/// What is wrong with tensors of a scaling: `read`, of which x is the first, and `written`, which may be one of them.
template <class T>
struct scaling_check {
  struct named_view {
    tensor_view<T const> view;
    char const* name;
  };

  char const* pass;

  void operator()(channel_scaling const& scaling, std::initializer_list<named_view> read,
                  named_view const& written) const {
    auto const& x = read.begin()->view;
    if (x.samples < 0 || x.channels < 0 || x.spatial < 0)
      fail("x has a negative extent: ", syncnorm::detail::extents_of(x));
    if (!syncnorm::detail::is_countable(x))
      fail("x has more elements than can be counted: ", syncnorm::detail::extents_of(x));
    if (scaling.groups < 1 || x.channels % scaling.groups != 0)
      fail(std::to_string(x.channels), " channels cannot be divided into ", std::to_string(scaling.groups), " groups");
    if (!(std::isfinite(scaling.eps) && scaling.eps >= 0))
      fail("eps is ", std::to_string(scaling.eps), ", expected a number >= 0");
    for (auto const& each : read) tensor(each, x);
    tensor(written, x);
    if (syncnorm::detail::overlaps_itself(written.view))
      fail(written.name, " has the strides ", syncnorm::detail::strides_of(written.view),
           ", by which its elements overlap");
    for (auto const& each : read)
      if (syncnorm::detail::place<T>(written.view, each.view) == syncnorm::detail::placement::overlapping &&
          !syncnorm::detail::are_same<T>(written.view, each.view))
        fail(written.name, " and ", each.name, " overlap in memory, and are not the same");
  }

private:
  template <class... Parts>
  [[noreturn]] void fail(Parts const&... parts) const {
    std::string message{pass};
    message.append(": ");
    (message.append(parts), ...);
    throw invalid_argument_error{message};
  }
  void tensor(named_view const& of, tensor_view<T const> const& x) const {
    auto const& [view, name] = of;
    if (view.samples != x.samples || view.channels != x.channels || view.spatial != x.spatial)
      fail(name, " is ", syncnorm::detail::extents_of(view), ", expected ", syncnorm::detail::extents_of(x), " as x");
    if (x.size() > 0 && view.data == nullptr) fail(name, " is null");
    if (!syncnorm::detail::fits_memory(view))
      fail(name, " has the strides ", syncnorm::detail::strides_of(view), ", which no memory has room for");
  }
};

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
/// x and y `[N, C, S]`, C a multiple of `scaling.groups` ≥ 1. Local; y may be x, and may not overlap it otherwise. Throws
/// invalid_argument_error. Source: the authors' code of "PowerNorm" (Shen et al., 2020), GroupScaling1D.
template <class T>
requires element<T>
void group_scaling(executor_ref exec, std::type_identity_t<tensor_view<T const>> x, tensor_view<T> y,
                   channel_scaling const& scaling) {
  using A = accumulate_t<T>;
  detail::scaling_check<T>{"group_scaling"}(scaling, {{x, "x"}}, {y, "y"});
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
  detail::scaling_check<T>{"group_scaling_backward"}(scaling, {{x, "x"}, {dy, "dy"}}, {dx, "dx"});
  detail::scratch_lease<A> table{2 * x.channels};
  detail::fill_identity(table.data(), x.channels);
  detail::power_backward_pass<false, true, T>(exec, dy, x, dx, {}, scaling, table.data(), table.data() + x.channels, {},
                                              {});
}

} // namespace syncnorm::host
