#pragma once

#include "support.hpp"

#include <syncnorm/torch/power_norm.hpp>

namespace test {

using syncnorm::torch::PowerNorm;
using syncnorm::torch::PowerNormImpl;
using syncnorm::torch::PowerNormOptions;
using syncnorm::torch::SyncPowerNorm;
using syncnorm::torch::SyncPowerNormImpl;

/// A tensor of dense `[N, C, S]` values as the module takes it: `[T, B, C]`, or with one position `[N, C]`, or
/// `[N, C, S, 1]` where four dimensions are wanted.
template <class T>
Tensor module_tensor(std::vector<T> values, std::int64_t n, std::int64_t c, std::int64_t s, bool four) {
  auto const type = std::is_same_v<T, double> ? torch::kDouble : torch::kFloat;
  auto const dense = torch::empty({n, c, s}, type);
  std::copy(values.begin(), values.end(), dense.template data_ptr<T>());
  if (four) return dense.view({n, c, s, 1}).clone();
  if (s == 1) return dense.view({n, c});
  return dense.permute({2, 0, 1}).contiguous();
}

/// The greatest magnitude over the whole batch, of which a rank has a part.
inline long double scale_of_all(std::vector<long double> const& values) {
  long double scale = 0;
  for (auto const value : values) scale = std::max(scale, std::abs(value));
  return scale;
}

/// The reverse, as doubles.
inline std::vector<double> dense_values(Tensor const& t) {
  auto x = t.detach().to(torch::kDouble);
  if (x.dim() == 3) x = x.permute({1, 2, 0});
  x = x.contiguous();
  return {x.data_ptr<double>(), x.data_ptr<double>() + x.numel()};
}

inline void set_parameters(torch::Tensor const& weight, torch::Tensor const& bias) {
  torch::NoGradGuard const no_recording;
  auto const ramp = torch::arange(1, weight.size(0) + 1, weight.scalar_type());
  weight.copy_(ramp * 0.25 + 0.5);
  bias.copy_(ramp * 0.1 - 1);
}

template <class Module>
[[nodiscard]] Module prepared(Module norm, torch::Dtype type = torch::kDouble) {
  norm->to(type);
  set_parameters(norm->weight, norm->bias);
  return norm;
}

template <class Module>
void train_step(Module& norm, Tensor const& x) {
  norm->forward(x.clone().requires_grad_()).pow(2).sum().backward();
}

} // namespace test
