#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>
#include <torch/types.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/overlap.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/torch/detail/check.hpp>
#include <syncnorm/torch/detail/recorded_pass.hpp>
#include <syncnorm/torch/detail/views.hpp>
#include <syncnorm/torch/epilogue.hpp>

namespace syncnorm::torch::detail {

/// What a forward pass of a module reads and writes, of whatever type.
struct forward_inputs {
  std::vector<at::Tensor> batches;      ///< the micro-batches that share one statistic
  std::vector<norm_epilogue> epilogues; ///< of each
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  batch_norm_options options{};
  std::int64_t channels = 0;
  statistics_scope scope = statistics_scope::all_ranks;
  bool in_place = false;
  std::shared_ptr<exchange_state> state{};

  [[nodiscard]] at::Tensor first() const { return batches.empty() ? at::Tensor{} : batches.front(); }

  /// Whether autograd asks for one of the gradients.
  [[nodiscard]] bool requires_grad() const {
    auto const requires_one = [](at::Tensor const& tensor) { return tensor.defined() && tensor.requires_grad(); };
    for (auto const& batch : batches)
      if (requires_one(batch)) return true;
    for (auto const& with : epilogues)
      if (requires_one(with.residual)) return true;
    return requires_one(weight) || requires_one(bias);
  }
  /// Has copies in place of inference tensors, none of which needs a gradient: others may, and then all are saved.
  void make_savable() {
    for (auto& batch : batches) batch = savable(batch);
    for (auto& with : epilogues) with.residual = savable(with.residual);
    for (auto* tensor : {&weight, &bias}) *tensor = savable(*tensor);
  }
  [[nodiscard]] at::ScalarType type_of_parameters() const {
    return detail::type_of_parameters(first(), {weight, bias, running_mean, running_var});
  }
};

/// Says what this rank needs of a backward pass, given whether it records and whether it needs gradients.
[[nodiscard]] inline backward_pass backward_of(bool records, bool needs) {
  return !records ? backward_pass::impossible : needs ? backward_pass::needed : backward_pass::possible;
}

/// Whether passes over these tensors are those of `use_cuda`. That is for the module's own tensors to say, which are where
/// they are on every rank; without any, there are no others.
[[nodiscard]] inline bool is_on_device(forward_inputs const& in) {
  if (in.state->device == nullptr) return false;
  for (auto const* tensor : {&in.weight, &in.bias, &in.running_mean, &in.running_var})
    if (tensor->defined()) return tensor->is_cuda();
  return true;
}

/// What is wrong with a pass over these tensors on the device `on`, besides what it checks for itself; empty where nothing is.
[[nodiscard]] inline std::string find_fault(forward_inputs const& in, backward_pass backward,
                                            at::Device on = at::kCPU) {
  bool const recorded = backward == backward_pass::needed;
  for (std::size_t k = 0; k < in.batches.size(); ++k) {
    auto const& input = in.batches[k];
    auto text = fault_or_thrown([&] {
      return find_fault(input, {in.weight, in.bias}, {in.running_mean, in.running_var}, in.num_batches_tracked, on);
    });
    if (text.empty() && input.scalar_type() != in.first().scalar_type()) text = "the input is of another type";
    if (text.empty() && in.in_place && input.is_inference() && !c10::InferenceMode::is_enabled())
      text = "the input is an inference tensor, which is written to in place in c10::InferenceMode alone";
    auto const& with = in.epilogues[k];
    if (text.empty()) text = fault_or_thrown([&] { return find_fault(with, input, on); });
    if (text.empty()) text = find_recording_fault({{input, "the input"}, {with.residual, "the residual"}}, recorded);
    if (!text.empty()) return in.batches.size() > 1 ? "micro-batch " + std::to_string(k) + ": " + text : text;
  }
  if (in.batches.empty()) return "there are no micro-batches; pass one without samples";
  return find_recording_fault({{in.weight, "weight"}, {in.bias, "bias"}}, recorded);
}

/// Makes epilogues of micro-batches, none or one for each, as many as these are. Says what is wrong with their number, or nothing.
[[nodiscard]] inline std::string complete_epilogues(std::vector<norm_epilogue>& epilogues, std::size_t batches) {
  auto const given = epilogues.size();
  epilogues.resize(batches);
  if (given == 0 || given == batches) return {};
  return syncnorm::detail::call_check::text("there are ", given, " epilogues, expected ", batches, " as micro-batches");
}

[[nodiscard]] inline bool share_storage(at::Tensor const& a, at::Tensor const& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

/// Whether two tensors have an element in common, or may have: of strides that no views express it is not known.
[[nodiscard]] inline bool may_overlap(at::Tensor const& a, at::Tensor const& b) {
  if (!share_storage(a, b)) return false;
  auto const status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  if (a.scalar_type() != b.scalar_type() || a.dim() < 2 || a.dim() != b.dim()) return true;
  // By bytes, of each element the first.
  auto const order = spatial_order(a);
  auto const view = [&](at::Tensor const& of) {
    auto all = view_at(static_cast<std::byte const*>(of.data_ptr()), of, order);
    if (!all) return all;
    auto const size = static_cast<std::int64_t>(of.element_size());
    for (auto* stride : {&all->stride_n, &all->stride_c, &all->stride_s}) *stride *= size;
    return all;
  };
  auto const of_a = view(a), of_b = view(b);
  return !of_a || !of_b || syncnorm::detail::overlap<std::byte>(*of_a, *of_b);
}

/// Says whether one of the inputs `of`, which is among `all`, is written to in place while another pass, called `another`, or one
/// over another micro-batch reads it.
[[nodiscard]] inline std::string find_shared_in_place(forward_inputs const& of, std::vector<forward_inputs> const& all,
                                                      std::string_view another) {
  if (!of.in_place) return {};
  for (auto const& x : of.batches)
    for (auto const& other : all)
      for (std::size_t k = 0; k < other.batches.size(); ++k)
        if (&other.batches[k] != &x &&
            (may_overlap(x, other.batches[k]) || may_overlap(x, other.epilogues[k].residual)))
          return syncnorm::detail::call_check::text("a pass in place writes to memory that ",
                                                    &other == &of ? "another micro-batch" : another, " reads");
  return {};
}

} // namespace syncnorm::torch::detail
