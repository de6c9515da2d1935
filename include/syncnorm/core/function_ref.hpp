#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace syncnorm {

template <class Signature>
class function_ref;

/// A callable object by reference, for a parameter of a function that is compiled once for all of them.
template <class R, class... Arguments>
class function_ref<R(Arguments...)> {
public:
  template <class F>
  requires(!std::is_same_v<F, function_ref> && !std::is_function_v<F> &&
           std::is_invocable_r_v<R, F const&, Arguments...>) function_ref(F const& f)
      : f_{std::addressof(f)}, call_{[](void const* of, Arguments... arguments) -> R {
          return (*static_cast<F const*>(of))(std::forward<Arguments>(arguments)...);
        }} {}

  R operator()(Arguments... arguments) const { return call_(f_, std::forward<Arguments>(arguments)...); }

private:
  void const* f_;
  R (*call_)(void const*, Arguments...);
};

} // namespace syncnorm
