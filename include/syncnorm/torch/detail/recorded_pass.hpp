#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch::detail {

/// What the passes of a module have in common. A pass that is recorded keeps it, whatever becomes of the module.
struct exchange_state {
  any_communicator comm;
  batch_norm_workspace workspace;
  std::shared_ptr<bool> exchange_backward =
      std::make_shared<bool>(true);                          ///< the module's, whatever becomes of its communicator
  std::int64_t batches_tracked = 0;                          ///< while a pass is completed, what num_batches_tracked is
  std::optional<batch_norm_group<any_communicator>> group{}; ///< of the passes with others, of which this is the first
  std::shared_ptr<device_passes> device{};                   ///< null: passes are of CPU tensors alone
};

/// What a recorded forward pass did to one micro-batch besides normalizing it.
struct recorded_epilogue {
  syncnorm::activation activation{};
  masked_outputs masked = masked_outputs::normalized;
};

/// What a forward pass leaves for its backward pass that may be as large as x, besides the tensors that it has read and written.
struct pass_memory {
  std::vector<at::Tensor> masks; ///< of each micro-batch, dense `[N, S]`, or undefined
  std::shared_ptr<void> kept{};  ///< what is kept of each x of a pass in place
};

/// A tensor that keeps `memory`, to be saved with others, so that it goes when autograd frees those.
[[nodiscard]] inline at::Tensor tensor_with(std::shared_ptr<pass_memory> const& memory) {
  return at::from_blob(
      memory.get(), {0}, [memory](void*) {}, at::kByte);
}

/// What a recorded forward pass leaves for its backward pass, besides tensors.
struct recorded_pass : ::torch::CustomClassHolder {
  std::shared_ptr<exchange_state> state;
  batch_norm_saved saved;
  at::ScalarType element = at::kFloat;        ///< the type of x, as far as there are passes of it
  std::int64_t channels = 0;                  ///< of the module
  at::ScalarType parameters = at::kFloat;     ///< the type of weight, bias and running statistics
  std::vector<recorded_epilogue> epilogues{}; ///< of each micro-batch
  bool in_place = false;                      ///< whether x is recovered from y
  bool has_memory = false;                    ///< masks, or what is kept
  std::weak_ptr<pass_memory> memory{};        ///< as long as autograd keeps the tensor that was saved for it
  std::shared_ptr<device_passes> device{};    ///< of a pass on a device, or null
  std::shared_ptr<device_record> on_device{}; ///< the same

  /// The workspace of a pass that follows. Only passes that exchange are in one thread at a time; others have their `own`.
  [[nodiscard]] batch_norm_workspace& workspace_or(std::optional<batch_norm_workspace>& own) const {
    return saved.scope == statistics_scope::all_ranks ? state->workspace
                                                      : own.emplace(static_cast<std::int64_t>(saved.mean.size()), true);
  }
};

/// What is wrong where saved tensors have been replaced by others, as hooks do; else empty.
[[nodiscard]] inline std::string find_memory_fault(recorded_pass const& pass,
                                                   std::shared_ptr<pass_memory> const& memory) {
  if (!pass.has_memory || memory != nullptr) return {};
  return "the masks, or what the pass in place kept, are gone with a saved tensor that was replaced, as by hooks";
}

/// The mask of a micro-batch, where there is one.
[[nodiscard]] inline mask_view mask_in(std::shared_ptr<pass_memory> const& memory, std::size_t batch) {
  return memory == nullptr ? mask_view{} : view_of_mask(memory->masks.at(batch));
}

/// The `[C]` values of `tensor`, which has to be contiguous; none where it is undefined.
template <class T>
[[nodiscard]] std::span<T> values_of(at::Tensor const& tensor) {
  if (!tensor.defined()) return {};
  return {elements_of<T>(tensor), static_cast<std::size_t>(tensor.numel())};
}

/// The tensors that a pass has saved; where one of them was written to meanwhile, none, and `fault` says so.
[[nodiscard]] inline ::torch::autograd::variable_list saved_tensors(::torch::autograd::AutogradContext& recorded,
                                                                    std::string& fault) {
  ::torch::autograd::variable_list saved;
  fault = fault_or_thrown([&] {
    saved = recorded.get_saved_variables();
    return std::string{};
  });
  return saved;
}

} // namespace syncnorm::torch::detail
