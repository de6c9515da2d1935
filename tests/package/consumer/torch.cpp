// The module of one rank does what libtorch's own does.

#include <cstdio>

#include <torch/torch.h>

#ifdef WITH_COMPILED_PASSES
#include <syncnorm/torch/compiled_passes.hpp>
#endif
#include <syncnorm/torch/sync_batch_norm.hpp>

int main() {
  auto const x = torch::randn({4, 3, 5, 5});
  syncnorm::torch::SyncBatchNorm ours{torch::nn::BatchNormOptions{3}};
  torch::nn::BatchNorm2d theirs{3};
  bool const same = torch::allclose(ours->forward(x), theirs->forward(x), 1e-5, 1e-5) &&
                    torch::allclose(ours->running_var, theirs->running_var, 1e-5, 1e-5);
  std::puts(same ? "as libtorch's own" : "differs from libtorch's own");
  return same ? 0 : 1;
}
