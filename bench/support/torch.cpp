#include "support/peers.hpp"

#include <array>

#include <ATen/Parallel.h>
#include <torch/types.h>

namespace bench {

peer_step torch_batch_norm(peer_problem const& problem, int threads) {
  at::set_num_threads(threads);
  auto const type = problem.is_double ? torch::kDouble : torch::kFloat;
  auto const n = problem.samples, c = problem.channels, s = problem.spatial;
  auto const wrap = [&](void* data) {
    if (s == 1) return torch::from_blob(data, {n, c}, type);
    if (problem.channels_last) return torch::from_blob(data, {n, c, s, 1}, {s * c, 1, c, c}, type);
    return torch::from_blob(data, {n, c, s, 1}, type);
  };
  auto const x = wrap(problem.x), dy = wrap(problem.dy);
  auto const gamma = torch::ones({c}, type), beta = torch::zeros({c}, type);
  auto const running_mean = torch::zeros({c}, type), running_var = torch::ones({c}, type);
  double const momentum = 0.1, eps = 1e-5;
  torch::NoGradGuard const no_grad;
  auto const forward = [=] {
    torch::NoGradGuard const no_grad_either;
    return at::native_batch_norm(x, gamma, beta, running_mean, running_var, true, momentum, eps);
  };
  if (!problem.backward) return [forward] { forward(); };
  auto const [y, mean, inv_std] = forward();
  return [=, mean = mean, inv_std = inv_std] {
    torch::NoGradGuard const no_grad_either;
    at::native_batch_norm_backward(dy, x, gamma, running_mean, running_var, mean, inv_std, true, eps,
                                   std::array<bool, 3>{true, true, true});
  };
}

} // namespace bench
