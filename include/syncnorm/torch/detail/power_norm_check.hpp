#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <syncnorm/ops/detail/batch_norm_checks.hpp>

namespace syncnorm::torch::detail {

/// `input` with its channels second: `[T, B, C]` as `[B, C, T]`; all others have them there.
[[nodiscard]] inline at::Tensor channels_second(at::Tensor const& input) {
  return input.dim() == 3 ? input.permute({1, 2, 0}) : input;
}
/// The reverse.
[[nodiscard]] inline at::Tensor channels_back(at::Tensor const& output) {
  return output.dim() == 3 ? output.permute({2, 0, 1}) : output;
}

/// The extents of a padding mask of `input`: a value for each sample and position.
[[nodiscard]] inline std::vector<std::int64_t> mask_extents(at::Tensor const& input) {
  if (input.dim() == 3) return {input.size(1), input.size(0)};
  std::vector<std::int64_t> extents{input.size(0)};
  for (std::int64_t d = 2; d < input.dim(); ++d) extents.push_back(input.size(d));
  return extents;
}

inline void check_dense(syncnorm::detail::call_check& check, at::Tensor const& tensor, char const* name) {
  check.require(tensor.layout() == at::kStrided,
                [&] { return check.text(name, " is ", tensor.layout(), ", expected Strided"); });
  check.require(tensor.device().is_cpu(),
                [&] { return check.text(name, " is on ", tensor.device(), ", expected cpu"); });
}

/// What `input` can have wrong; empty where nothing is.
[[nodiscard]] inline std::string find_input_fault(at::Tensor const& input) {
  syncnorm::detail::call_check check;
  refuse_tracing(check);
  check.require(input.defined(), [] { return "the input is undefined"; });
  if (check.failed()) return check.fault();
  check_dense(check, input, "the input");
  auto const type = input.scalar_type();
  check.require(type == at::kFloat || type == at::kDouble,
                [&] { return check.text("the input is of ", type, ", expected Float or Double"); });
  check.require(input.dim() >= 2, [&] {
    return check.text("the input has ", input.dim(),
                      " dimensions, expected [N, C], [T, B, C] or, with more than 3, [N, C, ...]");
  });
  return check.fault();
}

/// What the tensors of a power norm can have wrong besides; `input` has nothing. Mask and `iters` are undefined in evaluation, which
/// does without.
[[nodiscard]] inline std::string find_power_norm_fault(at::Tensor const& input, at::Tensor const& pad_mask,
                                                       std::array<at::Tensor, 2> const& parameters,
                                                       std::array<at::Tensor, 2> const& state,
                                                       at::Tensor const& iters) {
  syncnorm::detail::call_check check;
  auto const type = input.scalar_type();
  auto const of_channels = [&](at::Tensor const& tensor, char const* name) {
    if (!tensor.defined()) return;
    check_dense(check, tensor, name);
    check.require(tensor.scalar_type() == type,
                  [&] { return check.text("the input is of ", type, ", but ", name, " of ", tensor.scalar_type()); });
  };
  of_channels(parameters[0], "weight");
  of_channels(parameters[1], "bias");
  for (auto const& tensor : parameters) // whose gradients are so
    check.require(!tensor.defined() || tensor.dim() == 1,
                  [&] { return check.text("weight or bias is ", tensor.sizes(), ", expected [C]"); });
  of_channels(state[0], "running_phi");
  of_channels(state[1], "ema_gz");
  for (auto const& tensor : state)
    check.require(tensor.is_contiguous(), [] { return "running_phi or ema_gz is not contiguous"; });
  if (iters.defined()) {
    check_dense(check, iters, "iters");
    check.require(iters.scalar_type() == at::kLong && iters.numel() == 1, [&] {
      return check.text("iters has ", iters.numel(), " values of ", iters.scalar_type(), ", expected 1 of Long");
    });
  }
  if (!pad_mask.defined()) return check.fault();
  check_dense(check, pad_mask, "the padding mask");
  check.require(pad_mask.scalar_type() == at::kBool,
                [&] { return check.text("the padding mask is of ", pad_mask.scalar_type(), ", expected Bool"); });
  auto const expected = mask_extents(input);
  // [N, 1] stands for [N], as that of one position of N sequences.
  bool const column =
      input.dim() == 2 && pad_mask.dim() == 2 && pad_mask.size(0) == expected[0] && pad_mask.size(1) == 1;
  check.require(column || pad_mask.sizes() == at::IntArrayRef{expected}, [&] {
    return check.text("the padding mask is ", pad_mask.sizes(), ", expected ", at::IntArrayRef{expected});
  });
  return check.fault();
}

/// What a pass takes for the mask: a byte for each position, in the order in which it walks x, not 0 where the position
/// counts. `order`: the spatial dimensions of x, channels second, outermost first.
[[nodiscard]] inline at::Tensor counting_mask(at::Tensor const& pad_mask, std::vector<std::int64_t> const& order) {
  std::vector<std::int64_t> dimensions{0};
  for (auto const d : order) dimensions.push_back(d - 1);
  if (dimensions.size() == 1) return pad_mask.reshape({-1}).logical_not().contiguous();
  return pad_mask.logical_not().permute(dimensions).contiguous();
}

} // namespace syncnorm::torch::detail
