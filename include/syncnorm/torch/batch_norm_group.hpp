#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
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

/// The same over K micro-batches by one statistic, as `forward_batches`.
struct group_batches {
  SyncBatchNorm norm;
  std::vector<::torch::Tensor> inputs;
  std::vector<norm_epilogue> epilogues{}; ///< none, or one for each
};

/// Forward passes of a group whose exchange is under way; see `begin_group_forward`.
using pending_group_forward = pending_forwards;

namespace detail {

/// The passes of the modules of a group.
class members_of {
public:
  [[nodiscard]] static std::vector<std::unique_ptr<forward_pass>> passes(std::vector<group_member> const& members) {
    std::vector<group_batches> each;
    for (auto const& [norm, input, epilogue] : members) each.push_back({norm, {input}, {epilogue}});
    return passes(each);
  }

  [[nodiscard]] static std::vector<std::unique_ptr<forward_pass>> passes(std::vector<group_batches> const& members) {
    if (members.empty()) throw invalid_argument_error{"a group of modules is empty"};
    bool needs = false;
    std::vector<forward_inputs> inputs;
    std::vector<std::string> faults;
    for (auto const& member : members) {
      auto epilogues = member.epilogues;
      faults.push_back(complete_epilogues(epilogues, member.inputs.size()));
      inputs.push_back(member.norm->inputs_of(member.inputs, std::move(epilogues)));
      needs = needs || inputs.back().requires_grad();
      if (faults.back().empty() && inputs.back().scope == statistics_scope::this_rank && member.inputs.size() > 1)
        faults.back() = "micro-batches in evaluation without running statistics, which have no statistic in common";
    }
    auto const backward = backward_of(at::GradMode::is_enabled(), needs);
    auto const first = home_of(inputs.front());
    std::vector<std::unique_ptr<forward_pass>> passes;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (faults[i].empty())
        faults[i] =
            fault_or_thrown([&] { return find_shared_in_place(inputs[i], inputs, "another pass of the group"); });
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

/// Forward passes of a group over micro-batches whose exchange is under way; see `begin_group_forward_batches`.
class pending_group_batches {
public:
  explicit pending_group_batches(std::vector<group_batches> const& members)
      : pending_{{detail::members_of::passes(members), true}} {
    for (auto const& member : members) batches_.push_back(member.inputs.size());
  }

  [[nodiscard]] bool ready() { return pending_.ready(); }

  /// The outputs of each module's micro-batches, as `pending_forward::finish`.
  [[nodiscard]] std::vector<std::vector<::torch::Tensor>> finish() {
    auto const all = pending_.finish();
    std::vector<std::vector<::torch::Tensor>> outputs;
    auto next = all.begin();
    for (auto const count : batches_) {
      auto const end = next + static_cast<std::ptrdiff_t>(count);
      outputs.emplace_back(next, end);
      next = end;
    }
    return outputs;
  }

private:
  pending_forwards pending_;
  std::vector<std::size_t> batches_; // of each module
};

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

/// `group_forward` of modules each of which takes micro-batches by one statistic, whose number may differ between modules and
/// ranks but is at least 1:
///
///     auto const y = syncnorm::torch::group_forward_batches({{first, {x0, x1}}, {second, {u0, u1}, {with0, with1}}});
///
/// In evaluation, a module without running statistics takes one.
inline std::vector<std::vector<::torch::Tensor>> group_forward_batches(std::vector<group_batches> const& members) {
  return pending_group_batches{members}.finish();
}

/// Starts the exchange of `group_forward_batches`, and returns while it is under way, as `SyncBatchNormImpl::begin_forward`.
[[nodiscard]] inline pending_group_batches begin_group_forward_batches(std::vector<group_batches> const& members) {
  return pending_group_batches{members};
}

} // namespace syncnorm::torch
