#pragma once

#include <syncnorm/core/function_ref.hpp>

namespace syncnorm::torch::detail {

/// Passes of one or several modules whose exchange is under way. Destruction without `finish` drops them, as `pending_passes` says.
class begun_passes {
public:
  begun_passes() = default;
  begun_passes(begun_passes const&) = delete;
  begun_passes& operator=(begun_passes const&) = delete;
  virtual ~begun_passes() = default;

  /// Whether `finish` would not have to wait.
  [[nodiscard]] virtual bool ready() = 0;
  /// Completes the passes between before() and after(); on a device all of it on the stream that was current when they began, for
  /// which the current one waits. Once.
  virtual void finish(function_ref<void()> before, function_ref<void()> after) = 0;
};

} // namespace syncnorm::torch::detail
