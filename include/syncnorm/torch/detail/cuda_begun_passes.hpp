#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/torch/detail/begun_passes.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_kept.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>

namespace syncnorm::torch::detail {

/// A pass on a CUDA device, described, and the buffers that it uses.
struct cuda_plan final : device_plan {
  cuda_plan(cuda_buffers& of, std::unique_ptr<cuda::detail::planned_pass> planned,
            std::unique_ptr<kept_room::watch> watch = nullptr)
      : buffers{&of}, pass{std::move(planned)}, watched{std::move(watch)} {}

  cuda_buffers* buffers;
  cuda::batch_norm_pass pass;
  std::unique_ptr<kept_room::watch> watched; ///< until the pass is done
};

/// Passes on a CUDA device that have begun together. They stay on the stream on which they did, of which their memory is.
class cuda_begun_passes final : public begun_passes {
public:
  using watches = std::vector<std::unique_ptr<kept_room::watch>>;

  /// `begin(stream)` gives what is pending, and borrows `buffers`.
  template <class Begin>
  cuda_begun_passes(std::vector<cuda_buffers*> buffers, watches watched, Begin const& begin)
      : buffers_{std::move(buffers)}, home_{current_stream_of(buffers_.front()->device())} {
    cuda_buffers::turn const own{buffers_};
    auto until_begun = std::move(watched);
    pending_.emplace(begin(own.stream()));
    watched_ = std::move(until_begun);
  }
  ~cuda_begun_passes() override {
    if (finished_) return;
    try {
      c10::StreamGuard const at_home{home_};
      cuda_buffers::turn const own{buffers_};
      pending_.reset();
      watched_.clear();
    } catch (...) { // what is dropped is not missed
    }
  }

  [[nodiscard]] bool ready() override { return pending_->ready(); }

  void finish(function_ref<void()> before, function_ref<void()> after) override {
    try {
      c10::StreamGuard const at_home{home_};
      before();
      {
        finished_ = true;
        cuda_buffers::turn const own{buffers_};
        auto const until_finished = std::move(watched_);
        pending_->finish(own.stream());
      }
      after();
    } catch (...) {
      try {
        follow_home();
      } catch (...) { // the first error is the one to hear of
      }
      throw;
    }
    follow_home();
  }

  void hand_over(std::vector<at::Tensor> const& made) override {
    auto const current = current_stream_of(home_.device());
    if (current == home_) return;
    for (auto const& tensor : made)
      c10::impl::VirtualGuardImpl{at::kCUDA}.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
  }

private:
  /// Lets the current stream wait for the passes.
  void follow_home() const {
    auto const current = current_stream_of(home_.device());
    if (current == home_) return;
    c10::Event done{at::kCUDA};
    done.record(home_);
    done.block(current);
  }
  [[nodiscard]] static c10::Stream current_stream_of(at::Device device) {
    return c10::impl::VirtualGuardImpl{at::kCUDA}.getStream(device);
  }

  std::vector<cuda_buffers*> buffers_;
  c10::Stream home_;
  bool finished_ = false;
  watches watched_;
  std::optional<cuda::pending_passes> pending_;
};

} // namespace syncnorm::torch::detail
