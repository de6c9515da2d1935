#pragma once

#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/torch/detail/pending_outputs.hpp>

namespace syncnorm::torch {

/// A forward pass of a module whose exchange is under way; see `SyncBatchNormImpl::begin_forward`. Destruction without
/// `finish` waits for the exchange and drops what came, as `pending_passes` says: the ranks stay in step, and on this rank the
/// module is as it was, its running statistics behind those of ranks that finish the pass.
class pending_forward {
public:
  explicit pending_forward(detail::pending_outputs pending) : pending_{std::move(pending)} {}

  /// Whether `finish` would not have to wait.
  [[nodiscard]] bool ready() { return pending_.ready(); }

  /// Waits for the exchange and returns the output; of CUDA tensors, lets the current stream wait, and errors come up as `use_cuda`
  /// says. Not collective. Throws what is wrong on any rank, on every rank, and then leaves the running statistics as they were; and,
  /// on this rank alone, that the input was written to meanwhile. Once.
  [[nodiscard]] ::torch::Tensor finish() { return pending_.finish().front(); }

private:
  detail::pending_outputs pending_;
};

/// The same of several outputs: of the modules of a group, or of micro-batches.
class pending_forwards {
public:
  explicit pending_forwards(detail::pending_outputs pending) : pending_{std::move(pending)} {}

  [[nodiscard]] bool ready() { return pending_.ready(); }

  /// The outputs, as `pending_forward::finish`.
  [[nodiscard]] std::vector<::torch::Tensor> finish() { return pending_.finish(); }

private:
  detail::pending_outputs pending_;
};

} // namespace syncnorm::torch
