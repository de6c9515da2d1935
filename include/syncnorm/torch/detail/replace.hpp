#pragma once

#include <algorithm>
#include <concepts>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::torch::detail {

using module_ptr = std::shared_ptr<::torch::nn::Module>;

/// A module in a form that every container takes.
struct replacement {
  ::torch::nn::AnyModule any;
  module_ptr module;
};

template <class Impl>
[[nodiscard]] replacement make_replacement(std::shared_ptr<Impl> const& module) {
  return {::torch::nn::AnyModule{module}, module};
}

/// A module that is itself none of those that are replaced, by its type, and hence keeps its type.
template <class Impl, class... Replaced>
concept lasting_root = std::derived_from<Impl, ::torch::nn::Module> && !std::same_as<Impl, ::torch::nn::Module> &&
                       !(std::derived_from<Impl, Replaced> || ...);

/// What TORCH_MODULE defines.
template <class T>
concept module_holder = ::torch::detail::is_module_holder<T>::value;

/// `root`, which `result` has to be.
template <class Impl>
[[nodiscard]] std::shared_ptr<Impl> same_root(std::shared_ptr<Impl> const& root, module_ptr const& result,
                                              std::string const& conversion) {
  if (root == result) return root;
  throw invalid_argument_error{conversion + ": the module itself would be replaced by one of another type; pass it as "
                                            "std::shared_ptr<torch::nn::Module>"};
}

template <module_holder Holder>
[[nodiscard]] std::shared_ptr<typename Holder::ContainedType> held_by(Holder const& holder) {
  if (holder.is_empty()) return nullptr;
  return holder.ptr();
}

/// Finds modules in a tree, and the places that hold them, and puts others in their places.
class module_replacer {
public:
  using predicate = std::function<bool(::torch::nn::Module const&)>;

  /// Walks the tree below `root` for the modules that are `wanted`.
  module_replacer(::torch::nn::Module& root, predicate const& wanted) { walk(root, "", wanted); }

  /// The paths of those found where nothing can be put in their place: a member of a module of the user's own holds
  /// them by their type.
  [[nodiscard]] std::vector<std::string> const& fixed_paths() const noexcept { return fixed_paths_; }
  /// The same modules themselves.
  [[nodiscard]] std::vector<module_ptr> const& fixed() const noexcept { return fixed_; }

  /// Puts `make(module)` in the place of each module found that has one. A module held in several places is made anew
  /// once. Nothing has changed where `make` throws.
  void replace(std::function<replacement(::torch::nn::Module&)> const& make) {
    std::unordered_map<::torch::nn::Module*, replacement> made;
    for (auto const& [module, put] : places_)
      if (!made.contains(module.get())) made.emplace(module.get(), make(*module));
    for (auto const& [module, put] : places_) put(made.at(module.get()));
  }

private:
  struct place {
    module_ptr module;
    std::function<void(replacement const&)> put;
  };

  void walk(::torch::nn::Module& parent, std::string const& prefix, predicate const& wanted) {
    if (!visited_.insert(&parent).second) return;
    for (auto const& child : parent.named_children()) {
      auto const path = prefix + child.key();
      if (!wanted(*child.value())) {
        walk(*child.value(), path + ".", wanted);
      } else if (auto put = slot_of(parent, child.key(), child.value())) {
        places_.push_back({child.value(), std::move(put)});
      } else {
        fixed_paths_.push_back(path);
        fixed_.push_back(child.value());
      }
    }
  }

  /// How to replace `child`, registered in `parent` as `name`; empty where that is impossible.
  static std::function<void(replacement const&)> slot_of(::torch::nn::Module& parent, std::string const& name,
                                                         module_ptr const& child) {
    using namespace ::torch::nn;
    // Where a container is derived from, a member may be among its elements and registered by another name besides.
    auto const registered = [&](auto const& elements, auto const& is_child) {
      auto const children = parent.named_children();
      auto const names = std::ranges::count_if(children, [&](auto const& each) { return each.value() == child; });
      return names != 0 && names == std::ranges::count_if(elements, is_child);
    };
    if (auto* sequential = parent.as<SequentialImpl>()) {
      auto const is_child = [child](AnyModule const& element) { return element.ptr() == child; };
      if (registered(*sequential, is_child))
        return [=](replacement const& by) {
          std::ranges::replace_if(*sequential, is_child, by.any);
          sequential->replace_module(name, by.module);
        };
    } else if (auto* list = parent.as<ModuleListImpl>()) {
      if (registered(*list, [&](module_ptr const& element) { return element == child; }))
        return [=](replacement const& by) {
          std::ranges::replace(*list, child, by.module);
          list->replace_module(name, by.module);
        };
    } else if (auto* dict = parent.as<ModuleDictImpl>()) {
      if (dict->contains(name) && (*dict)[name] == child)
        return [dict, name](replacement const& by) {
          dict->update(std::vector<std::pair<std::string, module_ptr>>{{name, by.module}});
        };
    }
    return {};
  }

  std::set<::torch::nn::Module*> visited_;
  std::vector<place> places_;
  std::vector<std::string> fixed_paths_;
  std::vector<module_ptr> fixed_;
};

template <class Impl>
[[nodiscard]] bool is_a(::torch::nn::Module const& module) {
  return module.as<Impl>() != nullptr;
}

/// Puts `make(module)` in the place of each module below `root` that is `wanted`, and gives `comm` to every `Sync` there is then.
/// Where one has no such place, throws `cannot(its path and those of the others)`.
template <class Sync, class Make, class Cannot>
void synchronize_below(module_ptr const& root, module_replacer::predicate const& wanted, any_communicator const& comm,
                       Make const& make, Cannot const& cannot) {
  module_replacer replacer{*root, wanted};
  std::string paths;
  for (auto const& path : replacer.fixed_paths()) paths += (paths.empty() ? "" : ", ") + path;
  if (!paths.empty()) throw invalid_argument_error{cannot(paths)};
  replacer.replace(make);
  root->apply([&](::torch::nn::Module& each) {
    if (auto* const norm = each.as<Sync>()) norm->set_communicator(comm);
  });
}

/// Puts `make(module)` in the place of each `Sync` below `root`; one that has no such place becomes local instead.
template <class Sync, class Make>
void make_local_below(module_ptr const& root, Make const& make) {
  module_replacer replacer{*root, is_a<Sync>};
  replacer.replace([&](::torch::nn::Module& module) { return make(*module.as<Sync>()); });
  for (auto const& fixed : replacer.fixed()) fixed->as<Sync>()->set_communicator(self_communicator{});
}

} // namespace syncnorm::torch::detail
