#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/detail/forward_pass.hpp>
#include <syncnorm/torch/detail/typed_forward_pass.hpp>
#include <syncnorm/torch/epilogue.hpp>
#include <syncnorm/torch/pending_forward.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

/// One module's part in a group: what it normalizes, as `SyncBatchNormImpl::forward_with`.
struct group_member {
  SyncBatchNorm norm;
  ::torch::Tensor input;
  norm_epilogue epilogue{};
};

/// Forward passes of a group whose exchange is under way; see `begin_group_forward`.
using pending_group_forward = pending_forwards;

namespace detail {

/// The passes of the modules of a group.
class members_of {
public:
  [[nodiscard]] static std::vector<std::unique_ptr<forward_pass>> passes(std::vector<group_member> const& members) {
    if (members.empty()) throw invalid_argument_error{"a group of modules is empty"};
    bool needs = false;
    std::vector<forward_inputs> inputs;
    for (auto const& member : members) {
      inputs.push_back(member.norm->inputs_of({member.input}, {member.epilogue}));
      needs = needs || inputs.back().requires_grad();
    }
    auto const backward = backward_of(at::GradMode::is_enabled(), needs);
    auto const first = home_of(inputs.front());
    std::vector<std::unique_ptr<forward_pass>> passes;
    std::vector<std::string> faults;
    for (auto const& each : inputs)
      faults.push_back(fault_or_thrown([&] {
        auto text = find_shared_in_place(each, inputs, "another pass of the group");
        return text.empty() && inputs.size() > 1 ? find_view_in_place(each, backward) : text;
      }));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      auto& each = inputs[i];
      auto const home = home_of(each);
      std::string fault = find_fault(home, first);
      if (fault.empty()) fault = std::move(faults[i]);
      if (first.passes == nullptr) {
        passes.push_back(make_forward_pass(std::move(each), backward, std::move(fault)));
        continue;
      }
      // One that is elsewhere tells of that where the others are.
      auto const of_each = home.passes ? home.passes : first.passes->renewed();
      passes.push_back(of_each->make_forward_pass(std::move(each), backward, std::move(fault), first.place));
    }
    return passes;
  }

private:
  /// Where the passes of a module are, and on which rank.
  struct home {
    std::shared_ptr<device_passes> passes; ///< null: on the CPU
    at::Device place;
    int rank, size;
  };
  [[nodiscard]] static home home_of(forward_inputs const& in) {
    if (is_on_device(in)) {
      auto const& device = in.state->device;
      return {device, device->place_of(in), device->rank(), device->size()};
    }
    return {nullptr, at::kCPU, rank(in.state->comm), size(in.state->comm)};
  }
  [[nodiscard]] static std::string find_fault(home const& of, home const& first) {
    using syncnorm::detail::call_check;
    if (of.place != first.place)
      return call_check::text("the module is on ", of.place, ", the first of the group on ", first.place);
    if (of.size == first.size && of.rank == first.rank) return {};
    return call_check::text("the module is on rank ", of.rank, " of ", of.size, ", the first of the group on rank ",
                            first.rank, " of ", first.size);
  }
};

} // namespace detail

/// The outputs of several modules whose statistics travel in one collective, and the sums of their backward pass in one:
///
///     auto const y = syncnorm::torch::group_forward({{first, x}, {second, u}, {third, v, {.residual = w}}});
///
/// Each is what `forward_with` gives. No input may depend on another module's output, and the gradients of all outputs come
/// in one backward pass, an output that the loss does not depend on having the gradient 0. Collective, over the communicator
/// of the first module, as long as one is in training; all ranks pass the same modules in the same order, which are on the
/// same ranks, and devices. Modules in evaluation mode or with frozen statistics may be among them. What is wrong on one rank with
/// one of them is thrown on every rank, and then none has changed; of CUDA tensors, if not at once, in a later pass of the group or
/// where the first module is synchronized. Gradients of gradients take a collective for each module. A list
/// without modules, or with an empty one, is thrown at once, on this rank alone.
inline std::vector<::torch::Tensor> group_forward(std::vector<group_member> const& members) {
  return pending_group_forward{{detail::members_of::passes(members), true}}.finish();
}

/// Starts the exchange of `group_forward`, and returns while it is under way, as `SyncBatchNormImpl::begin_forward`.
[[nodiscard]] inline pending_group_forward begin_group_forward(std::vector<group_member> const& members) {
  return pending_group_forward{{detail::members_of::passes(members), true}};
}

} // namespace syncnorm::torch
