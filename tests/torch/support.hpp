#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <torch/torch.h>

// libtorch defines these where it has no glog; here they are doctest's.
#undef CHECK
#undef CHECK_EQ
#undef CHECK_NE
#undef CHECK_LE
#undef CHECK_LT
#undef CHECK_GE
#undef CHECK_GT
#include <doctest/doctest.h>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/compiled_passes.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

#include "support/message_of.hpp"

namespace test {

using syncnorm::torch::SyncBatchNorm;
using syncnorm::torch::SyncBatchNormImpl;
using torch::Tensor;
using torch::nn::BatchNormOptions;

/// The greatest difference relative to the greatest magnitude that is expected, of the whole batch where `got` is but a
/// part; NaN where there is one.
inline double error_of(Tensor const& got, Tensor const& expected, double scale = 0) {
  if (got.sizes() != expected.sizes()) return std::numeric_limits<double>::infinity();
  if (got.numel() == 0) return 0;
  auto const wide = expected.detach().to(torch::kDouble);
  auto const difference = (got.detach().to(torch::kDouble) - wide).abs().max().item<double>();
  return difference / std::max({scale, wide.abs().max().item<double>(), 1e-30});
}

inline double scale_of(Tensor const& tensor) { return tensor.detach().abs().max().item<double>(); }

/// The required accuracy, relative to the scale of the result.
inline double tolerance_of(torch::Dtype type) { return type == torch::kFloat ? 1e-5 : 1e-12; }

/// Copies of everything that a module saves.
inline std::vector<Tensor> state_of(torch::nn::Module const& module) {
  std::vector<Tensor> state;
  for (auto const& tensor : module.parameters()) state.push_back(tensor.detach().clone());
  for (auto const& tensor : module.buffers()) state.push_back(tensor.detach().clone());
  return state;
}

inline bool same_state(std::vector<Tensor> const& a, std::vector<Tensor> const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](Tensor const& x, Tensor const& y) { return x.dtype() == y.dtype() && torch::equal(x, y); });
}

/// A module whose parameters and buffers are all different.
inline SyncBatchNorm make_norm(BatchNormOptions const& options, syncnorm::any_communicator const& comm = {},
                               torch::Dtype type = torch::kDouble) {
  SyncBatchNorm norm{options, comm};
  if (type != torch::kFloat) norm->to(type); // which would make num_batches_tracked a float, too
  torch::NoGradGuard const no_recording;
  auto const ramp = torch::arange(1, options.num_features() + 1, type);
  if (options.affine()) {
    norm->weight.copy_(ramp * 0.5);
    norm->bias.copy_(ramp - 2);
  }
  if (options.track_running_stats()) {
    norm->running_mean.copy_(ramp * 0.1);
    norm->running_var.copy_(ramp * 0.3);
  }
  return norm;
}

/// The rows of one of two ranks, of five: 3, then 2.
inline Tensor rows_of(Tensor const& whole, int rank) { return rank == 0 ? whole.slice(0, 0, 3) : whole.slice(0, 3, 5); }

inline Tensor random(std::vector<std::int64_t> const& shape) { return torch::randn(shape, torch::kDouble); }

inline Tensor inference_copy(Tensor const& tensor) {
  c10::InferenceMode const inference;
  return tensor.clone();
}

/// This rank's part of a batch.
inline Tensor part_of(Tensor const& whole, std::vector<std::int64_t> const& shares, int rank) {
  std::int64_t first = 0;
  for (int r = 0; r < rank; ++r) first += shares[static_cast<std::size_t>(r)];
  return whole.slice(0, first, first + shares[static_cast<std::size_t>(rank)]).clone();
}

/// Σ over the ranks, in double. Collective.
inline Tensor sum_of_ranks(syncnorm::thread_communicator const& comm, Tensor const& of_rank) {
  auto sum = of_rank.detach().to(torch::kDouble).contiguous().clone();
  std::span const values{sum.data_ptr<double>(), static_cast<std::size_t>(sum.numel())};
  syncnorm::allreduce(comm, std::span<double const>{values}, values);
  return sum;
}

/// A tensor with a forward gradient, as long as this lives.
class dual_tensor {
public:
  explicit dual_tensor(Tensor const& primal)
      : tensor_{torch::_make_dual(primal, torch::ones_like(primal), static_cast<std::int64_t>(level_))} {}
  ~dual_tensor() { torch::autograd::forward_ad::exit_dual_level(level_); }
  dual_tensor(dual_tensor const&) = delete;
  dual_tensor& operator=(dual_tensor const&) = delete;

  [[nodiscard]] Tensor const& get() const { return tensor_; }

private:
  std::uint64_t level_ = torch::autograd::forward_ad::enter_dual_level();
  Tensor tensor_;
};

using test_support::contains, test_support::message_of;

} // namespace test
