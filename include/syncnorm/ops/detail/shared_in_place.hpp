#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include <syncnorm/core/detail/overlap.hpp>
#include <syncnorm/core/detail/view_checks.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// What is wrong with writing in place to each of K micro-batches of x, while the others and all residuals are still read, the
/// latter by the backward pass, too; empty where nothing is, or some x cannot be in memory, which the pass says. Epilogues: none, or K.
template <class T>
[[nodiscard]] std::string find_shared_in_place(std::span<tensor_view<T> const> x,
                                               std::span<batch_norm_epilogue<T> const> epilogues) {
  auto const is_sound = [](auto const& each) { return is_countable(each) && fits_memory(each); };
  if (!std::ranges::all_of(x, is_sound)) return {};
  for (std::size_t k = 0; k < x.size(); ++k)
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (i < k && overlap<T>(x[k], x[i]))
        return call_check::text(batch_name{"x", i, x.size()}, " and ", batch_name{"x", k, x.size()},
                                " are in the same memory, which a pass in place writes to");
      if (i < epilogues.size() && epilogues[i].has_residual() && is_sound(epilogues[i].residual) &&
          overlap<T>(x[k], epilogues[i].residual))
        return call_check::text(batch_name{"the residual", i, x.size()}, " is in the memory of ",
                                batch_name{"x", k, x.size()}, ", which a pass in place writes to");
    }
  return {};
}

} // namespace syncnorm::detail
