#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support.hpp"

// Steps of a module on any device, to compare.
namespace test {

using syncnorm::torch::norm_epilogue;

inline SyncBatchNorm copy_of(SyncBatchNorm const& norm) {
  return SyncBatchNorm{std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone())};
}

/// What a step gives, on the CPU.
struct step {
  Tensor y, dx, dresidual, dweight, dbias;
  std::vector<Tensor> buffers;
};

inline Tensor gradient_of(Tensor const& tensor) {
  return tensor.defined() && tensor.grad().defined() ? tensor.grad().cpu() : Tensor{};
}

/// Forward and backward passes of `norm` over copies of x, of which `part` is the input, dy, residual and mask on a device.
inline step run_step(
    SyncBatchNorm& norm, Tensor const& x, Tensor const& dy, norm_epilogue with = {},
    torch::Device const& on = torch::kCPU,
    std::function<Tensor(Tensor const&)> const& part = [](Tensor const& whole) { return whole; }) {
  auto const input = x.detach().to(on).requires_grad_();
  if (with.residual.defined()) with.residual = with.residual.detach().to(on).requires_grad_();
  if (with.mask.defined()) with.mask = with.mask.to(on);
  norm->zero_grad();
  auto const y = norm->forward_with(part(input), with);
  y.backward(dy.to(on).expand_as(y));
  norm->synchronize();
  step done{y.detach().cpu(),          gradient_of(input),      gradient_of(with.residual),
            gradient_of(norm->weight), gradient_of(norm->bias), {}};
  for (auto const& buffer : norm->buffers()) done.buffers.push_back(buffer.detach().cpu());
  return done;
}

/// Both sides are within `tolerance_of` of the exact values; results of 16 bits are rounded from such, to which they are as
/// near as half a unit in the last place, whose double a unit is.
inline double allowed(torch::Dtype type) {
  auto const rounding = type == torch::kHalf ? 0x1p-10 : type == torch::kBFloat16 ? 0x1p-7 : 0.0;
  return 2 * tolerance_of(type == torch::kDouble ? type : torch::kFloat) + rounding;
}

/// `scale`: of the sums that gradients of weight and bias are.
inline void check_same(step const& got, step const& expected, double scale = 1) {
  auto const same = [&](Tensor const& a, Tensor const& b, char const* what, double of) {
    INFO(std::string{what});
    REQUIRE(a.defined() == b.defined());
    if (!a.defined()) return;
    CHECK(a.dtype() == b.dtype());
    CHECK(a.strides() == b.strides());
    CHECK(error_of(a, b, of) <= allowed(b.scalar_type()));
  };
  same(got.y, expected.y, "y", 1);
  same(got.dx, expected.dx, "dx", 1);
  same(got.dresidual, expected.dresidual, "dresidual", 1);
  same(got.dweight, expected.dweight, "dweight", scale);
  same(got.dbias, expected.dbias, "dbias", scale);
  REQUIRE(got.buffers.size() == expected.buffers.size());
  for (std::size_t i = 0; i < got.buffers.size(); ++i) same(got.buffers[i], expected.buffers[i], "a buffer", 1);
}

/// All that is left of a step on the CPU: `results`, gradients of `leaves` and of the module, and its buffers.
inline std::vector<Tensor> left_of(SyncBatchNorm& norm, std::vector<Tensor> const& results,
                                   std::vector<Tensor> const& leaves) {
  norm->synchronize();
  std::vector<Tensor> all;
  for (auto const& result : results) all.push_back(result.detach().cpu());
  for (auto const& leaf : leaves) all.push_back(gradient_of(leaf));
  for (auto const& parameter : norm->parameters()) all.push_back(gradient_of(parameter));
  for (auto const& buffer : norm->buffers()) all.push_back(buffer.detach().cpu());
  return all;
}

inline void check_close(std::vector<Tensor> const& got, std::vector<Tensor> const& expected, double tolerance) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].defined() == expected[i].defined());
    if (!got[i].defined()) continue;
    CHECK(got[i].strides() == expected[i].strides());
    CHECK(error_of(got[i], expected[i], 5) <= tolerance);
  }
}

} // namespace test
