#pragma once

#include <vector>

#include <ATen/ATen.h>

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
  /// which the current one waits, also where this throws. Once.
  virtual void finish(function_ref<void()> before, function_ref<void()> after) = 0;
  /// What the passes have made is used on the stream that is current now, so their memory stays until that is done with it, too.
  virtual void hand_over(std::vector<at::Tensor> const&) {}
};

} // namespace syncnorm::torch::detail
