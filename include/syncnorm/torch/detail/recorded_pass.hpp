#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/element.hpp>

namespace syncnorm::torch::detail {

/// What the passes of a module have in common. A pass that is recorded keeps it, whatever becomes of the module.
struct exchange_state {
  any_communicator comm;
  batch_norm_workspace workspace;
  bool exchange_backward = true;
  std::int64_t batches_tracked = 0;                          ///< while a pass is completed, what num_batches_tracked is
  std::optional<batch_norm_group<any_communicator>> group{}; ///< of the passes with others, of which this is the first
  std::shared_ptr<device_passes> device{};                   ///< null: passes are of CPU tensors alone
};

/// What a recorded forward pass did to one micro-batch besides normalizing it.
struct recorded_epilogue {
  syncnorm::activation activation{};
  masked_outputs masked = masked_outputs::normalized;
  at::Tensor mask{}; ///< dense `[N, S]`, or undefined
};

/// What a recorded forward pass leaves for its backward pass, besides tensors.
struct recorded_pass : ::torch::CustomClassHolder {
  std::shared_ptr<exchange_state> state;
  batch_norm_saved saved;
  at::ScalarType element = at::kFloat;        ///< the type of x, as far as there are passes of it
  std::int64_t channels = 0;                  ///< of the module
  at::ScalarType parameters = at::kFloat;     ///< the type of weight, bias and running statistics
  std::vector<recorded_epilogue> epilogues{}; ///< of each micro-batch
  std::shared_ptr<void> kept{};               ///< what is kept of each x of a pass in place, or null
  std::shared_ptr<device_passes> device{};    ///< of a pass on a device, or null
  std::shared_ptr<device_record> on_device{}; ///< the same

  /// The workspace of a pass that follows. Only passes that exchange are in one thread at a time; others have their `own`.
  [[nodiscard]] batch_norm_workspace& workspace_or(std::optional<batch_norm_workspace>& own) const {
    return saved.scope == statistics_scope::all_ranks ? state->workspace
                                                      : own.emplace(static_cast<std::int64_t>(saved.mean.size()), true);
  }
};

/// The `[C]` values of `tensor`, which has to be contiguous; none where it is undefined.
template <class T>
[[nodiscard]] std::span<T> values_of(at::Tensor const& tensor) {
  if (!tensor.defined()) return {};
  return {elements_of<T>(tensor), static_cast<std::size_t>(tensor.numel())};
}

/// The tensors that a pass has saved; where one of them was written to meanwhile, none, and `fault` says so.
[[nodiscard]] inline ::torch::autograd::variable_list saved_tensors(::torch::autograd::AutogradContext& recorded,
                                                                    std::string& fault) {
  try {
    return recorded.get_saved_variables();
  } catch (std::exception const& e) {
    fault = text_of(e);
    return {};
  }
}

} // namespace syncnorm::torch::detail
