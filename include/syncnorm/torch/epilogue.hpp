#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/views.hpp>

namespace syncnorm::torch {

/// What `SyncBatchNormImpl::forward_with` does besides normalizing; `batch_norm_epilogue`, of tensors.
struct norm_epilogue {
  syncnorm::activation activation{};
  at::Tensor residual{}; ///< of the shape and type of the input; undefined: none
  at::Tensor mask{};     ///< of bool or uint8, `[N, …]` as the input without its channels; undefined: none
  masked_outputs masked = masked_outputs::normalized;
};

namespace detail {

/// What is wrong with an epilogue besides what a pass checks for itself; empty where nothing is.
[[nodiscard]] inline std::string find_fault(norm_epilogue const& epilogue, at::Tensor const& input,
                                            at::Device on = at::kCPU) {
  syncnorm::detail::call_check check;
  auto const& [activation, residual, mask, masked] = epilogue;
  if (residual.defined()) {
    require_on(check, residual, "the residual", on);
    check.require(residual.sizes() == input.sizes(), [&, &r = residual] {
      return check.text("the residual is ", r.sizes(), ", expected ", input.sizes(), " as the input");
    });
    check.require(residual.scalar_type() == input.scalar_type(), [&, &r = residual] {
      return check.text("the residual is of ", r.scalar_type(), ", expected ", input.scalar_type(), " as the input");
    });
  }
  if (mask.defined()) {
    require_on(check, mask, "the mask", on);
    auto expected = input.sizes().vec();
    expected.erase(expected.begin() + 1);
    check.require(mask.sizes() == expected, [&, &m = mask] {
      return check.text("the mask is ", m.sizes(), ", expected ", at::IntArrayRef{expected},
                        " as the input without its channels");
    });
    check.require(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte,
                  [&, &m = mask] { return check.text("the mask is of ", m.scalar_type(), ", expected Bool or Byte"); });
  }
  return check.fault();
}

/// A copy of the bytes of a mask `[N, …]`, its spatial dimensions in the order of a view of the input, `[N, S]`.
[[nodiscard]] inline at::Tensor dense_mask(at::Tensor const& mask, std::vector<std::int64_t> const& order) {
  std::vector<std::int64_t> dimensions{0};
  for (auto const d : order) dimensions.push_back(d - 1);
  auto const rows = mask.permute(dimensions).clone(at::MemoryFormat::Contiguous);
  return rows.view({mask.size(0), mask.numel() == 0 ? 0 : mask.numel() / mask.size(0)});
}

[[nodiscard]] inline mask_view view_of_mask(at::Tensor const& dense) {
  if (!dense.defined()) return {};
  return mask_of(static_cast<std::uint8_t const*>(dense.data_ptr()), dense.size(0), dense.size(1));
}

} // namespace detail

} // namespace syncnorm::torch
