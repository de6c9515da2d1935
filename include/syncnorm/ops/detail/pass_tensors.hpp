#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// Says in `check` what is wrong with the extents of the K micro-batches of a forward pass, and with their memory by itself.
template <class T>
void check_forward_tensors(call_check& check, std::span<tensor_view<T const> const> x,
                           std::span<tensor_view<T> const> y, std::int64_t channels) {
  auto const batches = x.size();
  check.require(y.size() == batches, [&] {
    return check.text("there are ", y.size(), " micro-batches of y, expected ", batches, " as of x");
  });
  for (std::size_t k = 0; k < batches && !check.failed(); ++k) {
    check.tensor(x[k], batch_name{"x", k, batches}, channels);
    check.output(y[k], batch_name{"y", k, batches}, x[k]);
  }
}

/// The same of a backward pass; `own_count`: as `batch_norm_saved` has it.
template <class T>
void check_backward_tensors(call_check& check, std::span<tensor_view<T const> const> dy,
                            std::span<tensor_view<T const> const> x, std::span<tensor_view<T> const> dx,
                            std::int64_t channels, std::int64_t own_count) {
  auto const batches = x.size();
  check.require(dy.size() == batches && (dx.empty() || dx.size() == batches), [&] {
    return check.text("there are ", dy.size(), " micro-batches of dy and ", dx.size(), " of dx, expected ", batches,
                      " as of x");
  });
  for (std::size_t k = 0; k < batches && !check.failed(); ++k) {
    check.tensor(x[k], batch_name{"x", k, batches}, channels);
    check.same_extents(dy[k], batch_name{"dy", k, batches}, x[k]);
    if (!dx.empty() && dx[k].is_given()) check.output(dx[k], batch_name{"dx", k, batches}, x[k]);
  }
  check.own_count(check.count_of(x), own_count);
}

} // namespace syncnorm::detail
