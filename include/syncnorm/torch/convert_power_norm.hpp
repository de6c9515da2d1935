#pragma once

#include <memory>
#include <string>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/torch/detail/replace.hpp>
#include <syncnorm/torch/power_norm.hpp>

namespace syncnorm::torch {

namespace detail {

template <class To, class From, class... Arguments>
[[nodiscard]] replacement make_power_norm(From& norm, Arguments const&... arguments) {
  auto const made = std::make_shared<To>(norm.options, arguments...);
  made->share_state(norm);
  return make_replacement(made);
}

} // namespace detail

/// Puts a SyncPowerNorm over `comm` in the place of every PowerNorm in `module`, and gives `comm` to every SyncPowerNorm
/// there is; returns `module`, or what replaces it where it is a PowerNorm itself. Not collective, but for the same model on
/// every rank. The new modules have the very tensors of the old ones, so that optimizers made before go on.
///
/// As with batch norms, only the elements of Sequential, ModuleList and ModuleDict are replaced. Throws
/// invalid_argument_error, with the paths of all others, and has changed nothing then.
inline std::shared_ptr<::torch::nn::Module> convert_sync_powernorm(std::shared_ptr<::torch::nn::Module> const& module,
                                                                   any_communicator const& comm) {
  if (module == nullptr) throw invalid_argument_error{"convert_sync_powernorm: the module is null"};
  if (auto* norm = module->as<PowerNormImpl>()) return detail::make_power_norm<SyncPowerNormImpl>(*norm, comm).module;
  detail::synchronize_below<SyncPowerNormImpl>(
      module, detail::is_a<PowerNormImpl>, comm,
      [&](::torch::nn::Module& norm) {
        return detail::make_power_norm<SyncPowerNormImpl>(*norm.as<PowerNormImpl>(), comm);
      },
      [](std::string const& paths) {
        return "convert_sync_powernorm: cannot replace " + paths +
               ": members that hold a power norm by its type. Hold them in a torch::nn::Sequential, or declare them as "
               "syncnorm::torch::SyncPowerNorm, which is local until converted";
      });
  return module;
}

/// The same of a module that is held by its type, which is returned.
template <detail::lasting_root<PowerNormImpl> Impl>
std::shared_ptr<Impl> convert_sync_powernorm(std::shared_ptr<Impl> const& module, any_communicator const& comm) {
  return detail::same_root(module, convert_sync_powernorm(detail::module_ptr{module}, comm), "convert_sync_powernorm");
}
template <detail::module_holder Holder>
Holder convert_sync_powernorm(Holder const& module, any_communicator const& comm) {
  static_assert(detail::lasting_root<typename Holder::ContainedType, PowerNormImpl>,
                "convert_sync_powernorm: a PowerNorm itself is replaced by a module of another type; pass its ptr()");
  return convert_sync_powernorm(detail::held_by(module), comm);
}

/// The reverse: puts a PowerNorm in the place of every SyncPowerNorm in `module`; returns `module`, or what replaces it where
/// it is a SyncPowerNorm itself. One that a member holds by its type stays, with a communicator of its own rank alone, which
/// is as local. The tensors are the same.
inline std::shared_ptr<::torch::nn::Module> revert_sync_powernorm(std::shared_ptr<::torch::nn::Module> const& module) {
  if (module == nullptr) throw invalid_argument_error{"revert_sync_powernorm: the module is null"};
  if (auto* norm = module->as<SyncPowerNormImpl>()) return detail::make_power_norm<PowerNormImpl>(*norm).module;
  detail::make_local_below<SyncPowerNormImpl>(
      module, [](SyncPowerNormImpl& norm) { return detail::make_power_norm<PowerNormImpl>(norm); });
  return module;
}

/// The same of a module that is held by its type, which is returned.
template <detail::lasting_root<SyncPowerNormImpl> Impl>
std::shared_ptr<Impl> revert_sync_powernorm(std::shared_ptr<Impl> const& module) {
  return detail::same_root(module, revert_sync_powernorm(detail::module_ptr{module}), "revert_sync_powernorm");
}
template <detail::module_holder Holder>
Holder revert_sync_powernorm(Holder const& module) {
  static_assert(
      detail::lasting_root<typename Holder::ContainedType, SyncPowerNormImpl>,
      "revert_sync_powernorm: a SyncPowerNorm itself is replaced by a module of another type; pass its ptr()");
  return revert_sync_powernorm(detail::held_by(module));
}

} // namespace syncnorm::torch
