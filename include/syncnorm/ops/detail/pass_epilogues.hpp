#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// The epilogues of the K micro-batches of a pass, checked and ready.
template <class T>
class pass_epilogues {
public:
  using given = std::span<batch_norm_epilogue<T> const>;

  /// None, or one for each of `x`. Says in `check` what is wrong.
  pass_epilogues(call_check& check, given epilogues, std::span<tensor_view<T const> const> x) {
    auto const batches = x.size();
    check.require(epilogues.empty() || epilogues.size() == batches, [&] {
      return check.text("there are ", epilogues.size(), " epilogues, expected ", batches, " as micro-batches of x");
    });
    for (std::size_t k = 0; k < epilogues.size() && !check.failed(); ++k)
      check_one(check, epilogues[k], x[k], k, batches);
    if (check.failed() || epilogues.empty()) return;
    first_ = epilogues[0];
    more_.assign(epilogues.begin() + 1, epilogues.end());
  }

  [[nodiscard]] host::prepared_epilogue<T> const& operator[](std::size_t k) const {
    return k == 0 || more_.empty() ? first_ : more_[k - 1];
  }

  static void check_one(call_check& check, batch_norm_epilogue<T> const& epilogue, tensor_view<T const> const& x,
                        std::size_t k = 0, std::size_t batches = 1) {
    double const slope = epilogue.activation.negative_slope;
    check.require(std::isfinite(slope),
                  [&] { return check.text("the negative slope of the activation is ", slope, ", expected a number"); });
    if (epilogue.has_residual()) check.same_extents(epilogue.residual, batch_name("the residual", k, batches), x);
    if (!epilogue.mask) return;
    auto const& mask = epilogue.mask;
    auto const name = batch_name("the mask", k, batches);
    check.require(mask.samples == x.samples && mask.spatial == x.spatial, [&] {
      return check.text(name, " is [", mask.samples, ", ", mask.spatial, "], expected [", x.samples, ", ", x.spatial,
                        "] as x");
    });
    check.require(mask.data != nullptr || x.count() == 0, [&] { return check.text(name, " is null"); });
  }

private:
  host::prepared_epilogue<T> first_;
  std::vector<host::prepared_epilogue<T>> more_;
};

} // namespace syncnorm::detail
