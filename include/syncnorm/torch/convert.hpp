#pragma once

#include <memory>
#include <string>

#include <torch/nn/modules/batchnorm.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/torch/detail/registry.hpp>
#include <syncnorm/torch/detail/replace.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

namespace detail {

/// Calls f(batch norm, its dimension) where `module` is a torch::nn::BatchNorm1d, 2d or 3d, or derived from one, and
/// returns whether it is.
template <class F>
bool visit_batch_norm(::torch::nn::Module const& module, F const& f) {
  if (auto const* one = module.as<::torch::nn::BatchNorm1dImpl>()) return f(*one, 1), true;
  if (auto const* two = module.as<::torch::nn::BatchNorm2dImpl>()) return f(*two, 2), true;
  if (auto const* three = module.as<::torch::nn::BatchNorm3dImpl>()) return f(*three, 3), true;
  return false;
}

[[nodiscard]] inline bool is_batch_norm(::torch::nn::Module const& module) {
  return visit_batch_norm(module, [](auto const&, int) {});
}

[[nodiscard]] inline replacement make_synchronized(::torch::nn::Module const& module, any_communicator const& comm) {
  std::shared_ptr<SyncBatchNormImpl> made;
  visit_batch_norm(module, [&](auto const& norm, int dimension) {
    // Loading may have given it tensors of other extents than its options say.
    auto options = norm.options;
    for (auto const* tensor : {&norm.weight, &norm.running_mean})
      if (tensor->defined()) options.num_features(tensor->numel());
    made = std::make_shared<SyncBatchNormImpl>(options, comm, dimension);
    share_state(norm, *made);
  });
  return make_replacement(made);
}

template <class Impl>
[[nodiscard]] replacement make_local_as(SyncBatchNormImpl const& norm) {
  auto const made = std::make_shared<Impl>(norm.options);
  share_state(norm, *made);
  return make_replacement(made);
}

[[nodiscard]] inline replacement make_local(SyncBatchNormImpl const& norm) {
  if (norm.running_variance_kind() != running_variance::unbiased)
    throw invalid_argument_error{
        "revert_sync_batchnorm: a module keeps biased running variances, or running standard deviations, "
        "which torch::nn::BatchNorm would take for unbiased variances"};
  if (norm.batch_variance_kind() != batch_variance::biased)
    throw invalid_argument_error{"revert_sync_batchnorm: a module normalizes by the unbiased variance of a batch, "
                                 "torch::nn::BatchNorm by the biased one"};
  if (norm.has_frozen_statistics())
    throw invalid_argument_error{"revert_sync_batchnorm: a module has frozen statistics, which torch::nn::BatchNorm "
                                 "would update in training; freeze_statistics(false) comes before"};
  if (norm.weight.defined() != norm.bias.defined())
    throw invalid_argument_error{"revert_sync_batchnorm: a module has a weight or a bias alone, to which a clone of a "
                                 "torch::nn::BatchNorm would add the other"};
  switch (norm.revert_dimension()) {
  case 1:
    return make_local_as<::torch::nn::BatchNorm1dImpl>(norm);
  case 3:
    return make_local_as<::torch::nn::BatchNorm3dImpl>(norm);
  default:
    return make_local_as<::torch::nn::BatchNorm2dImpl>(norm);
  }
}

} // namespace detail

/// Puts a SyncBatchNorm over `comm` in the place of every torch::nn::BatchNorm1d, 2d and 3d in `module`, and gives
/// `comm` to every SyncBatchNorm there is; returns `module`, or what replaces it where it is a batch norm itself. Not
/// collective, but for the same model on every rank. Of a class derived from a batch norm, what it overrides is lost; what it has
/// registered besides stays, but then `clone` throws, of the whole model, too, and also after `revert_sync_batchnorm`.
///
/// The new modules have the very tensors of the old ones, so that optimizers made before go on. What holds a module by
/// its type, in C++, cannot hold another: only the elements of Sequential, ModuleList and ModuleDict are replaced.
/// Throws invalid_argument_error, with the paths of all others, and has changed nothing then. What holds an element
/// without having registered it, a variable or a member, goes on with the old module, which stays local; and who takes an
/// element by its type, as `list[0]->as<torch::nn::BatchNorm2d>()`, gets null, since it is a SyncBatchNorm.
inline std::shared_ptr<::torch::nn::Module> convert_sync_batchnorm(std::shared_ptr<::torch::nn::Module> const& module,
                                                                   any_communicator const& comm) {
  if (module == nullptr) throw invalid_argument_error{"convert_sync_batchnorm: the module is null"};
  if (detail::is_batch_norm(*module)) return detail::make_synchronized(*module, comm).module;
  detail::synchronize_below<SyncBatchNormImpl>(
      module, detail::is_batch_norm, comm,
      [&](::torch::nn::Module& norm) { return detail::make_synchronized(norm, comm); },
      [](std::string const& paths) {
        return "convert_sync_batchnorm: cannot replace " + paths +
               ": members that hold a batch norm by its type. Hold them in a torch::nn::Sequential, or declare them as "
               "syncnorm::torch::SyncBatchNorm, which is local until converted";
      });
  return module;
}

/// The same of a module that is held by its type, which is returned.
template <
    detail::lasting_root<::torch::nn::BatchNorm1dImpl, ::torch::nn::BatchNorm2dImpl, ::torch::nn::BatchNorm3dImpl> Impl>
std::shared_ptr<Impl> convert_sync_batchnorm(std::shared_ptr<Impl> const& module, any_communicator const& comm) {
  return detail::same_root(module, convert_sync_batchnorm(detail::module_ptr{module}, comm), "convert_sync_batchnorm");
}
template <detail::module_holder Holder>
Holder convert_sync_batchnorm(Holder const& module, any_communicator const& comm) {
  static_assert(detail::lasting_root<typename Holder::ContainedType, ::torch::nn::BatchNorm1dImpl,
                                     ::torch::nn::BatchNorm2dImpl, ::torch::nn::BatchNorm3dImpl>,
                "convert_sync_batchnorm: a batch norm itself is replaced by a module of another type; pass its ptr()");
  return convert_sync_batchnorm(detail::held_by(module), comm);
}

/// The reverse: puts a BatchNorm1d, 2d or 3d in the place of every SyncBatchNorm in `module`, as it was before the
/// conversion, and otherwise by its `revert_dimension`; returns `module`, or what replaces it where it is a SyncBatchNorm
/// itself. A SyncBatchNorm that a member holds by its type stays, with a communicator of its own rank alone, which is as
/// local; for CUDA tensors it needs `use_cuda` again, with `self_communicator`. The tensors are the same. Throws
/// invalid_argument_error, and has changed nothing then, where a BatchNorm in its place could not do as the module: with frozen
/// statistics, biased running variances, running standard deviations, normalized by the unbiased variance, or with a weight or bias alone.
inline std::shared_ptr<::torch::nn::Module> revert_sync_batchnorm(std::shared_ptr<::torch::nn::Module> const& module) {
  if (module == nullptr) throw invalid_argument_error{"revert_sync_batchnorm: the module is null"};
  if (auto const* norm = module->as<SyncBatchNormImpl>()) return detail::make_local(*norm).module;
  detail::make_local_below<SyncBatchNormImpl>(module, detail::make_local);
  return module;
}

/// The same of a module that is held by its type, which is returned.
template <detail::lasting_root<SyncBatchNormImpl> Impl>
std::shared_ptr<Impl> revert_sync_batchnorm(std::shared_ptr<Impl> const& module) {
  return detail::same_root(module, revert_sync_batchnorm(detail::module_ptr{module}), "revert_sync_batchnorm");
}
template <detail::module_holder Holder>
Holder revert_sync_batchnorm(Holder const& module) {
  static_assert(
      detail::lasting_root<typename Holder::ContainedType, SyncBatchNormImpl>,
      "revert_sync_batchnorm: a SyncBatchNorm itself is replaced by a module of another type; pass its ptr()");
  return revert_sync_batchnorm(detail::held_by(module));
}

} // namespace syncnorm::torch
